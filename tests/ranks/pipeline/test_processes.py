"""Pipelines of real processes: the values of ranks as threads, and a killed stage stops the others with its name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from tests.helpers.compiling import CountsGraphs
from tests.helpers.composition import AXES, settings_of
from tests.helpers.composition_runs import Trainer, Values
from tests.helpers.gloo_pool import GlooRankError
from tests.helpers.pipeline_cases import engine_of_layers
from tests.helpers.pipeline_layers import WIDTH, batches

pytestmark = pytest.mark.gloo


def layers() -> list[nn.Module]:
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    made[7].weight = made[0].weight
    return [nn.Sequential(layer, nn.Tanh()) for layer in made]


def train(rank: int, size: int, stage: int, schedule: str, virtual: int) -> dict[str, Any]:
    engine = engine_of_layers(layers, 2, stage, schedule, virtual)
    losses = [float(engine.train_batch(batches(engine.axes.batch.rank, step, 4))) for step in range(2)]
    losses.append(float(engine.eval_batch(batches(0, 9, 4))))
    return {"losses": losses, "values": engine.module_state_dict()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("stage", "schedule", "virtual"), [(1, "zbv", 2), (3, "1f1b", 1), (3, "zbv", 2)])
def test_processes_give_the_values_of_threads(
    gloo: Callable[..., Any], size: int, stage: int, schedule: str, virtual: int
) -> None:
    expected = run_ranks(size, lambda: train(0, size, stage, schedule, virtual))[0]
    for found in gloo(size, train, stage, schedule, virtual):
        assert found["losses"] == expected["losses"]
        assert all(torch.equal(found["values"][name], value) for name, value in expected["values"].items())


def train_cut_and_split(rank: int, size: int, precision: str) -> tuple[torch.Tensor, Values]:
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    settings, run = settings_of({**plain, "tp": "2 split", "pp": "2", "precision": precision})
    return Trainer(settings, run, Path(), CountsGraphs("aot_eager")).train()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_processes_find_shapes_of_split_modules_of_other_stages_without_communication(
    gloo: Callable[..., Any], precision: str
) -> None:
    """The first stage's embedding is summed over the tensor-parallel ranks; the second stage knows its shape alone."""
    expected = run_ranks(4, lambda: train_cut_and_split(0, 4, precision))
    for (losses, values), (_, wanted) in zip(gloo(4, train_cut_and_split, precision), expected, strict=True):
        assert losses.isfinite().all()
        assert values.keys() == wanted.keys() != set()
        assert all(torch.equal(values[name], value) for name, value in wanted.items())


def die_in_the_second_forward(rank: int, size: int, stage: int, schedule: str, virtual: int) -> None:
    engine = engine_of_layers(layers, 2, stage, schedule, virtual)
    engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
    if rank == size - 1:
        calls = []

        def die(*_: Any) -> None:
            calls.append(0)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        next(module for module in engine.module.modules() if isinstance(module, nn.Tanh)).register_forward_hook(die)
    for step in range(1, 4):
        engine.train_batch(batches(engine.axes.batch.rank, step, 4))


@pytest.mark.parametrize(("size", "stage", "schedule", "virtual"), [(4, 3, "zbv", 2)])
def test_a_killed_stage_stops_the_others_which_name_it_and_their_action(
    gloo: Callable[..., Any], size: int, stage: int, schedule: str, virtual: int
) -> None:
    began = time.monotonic()
    with pytest.raises(GlooRankError) as caught:
        gloo(size, die_in_the_second_forward, stage, schedule, virtual, timeout=50.0)
    assert time.monotonic() - began < 45
    found = caught.value.tracebacks
    assert found.pop(size - 1) == "the process died before it answered"
    assert sorted(found) == list(range(size - 1))
    for text in found.values():
        assert f"rank {size - 1}" in text
    assert any("of the pipeline schedule: stage" in text for text in found.values())
