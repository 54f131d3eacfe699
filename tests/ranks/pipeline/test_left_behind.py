"""Losses that read what blocks of all stages leave behind, in pipelines: training is that of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from tests.helpers.left_behind_models import (
    WIDTH,
    attributes,
    build,
    checkpointed,
    further_outputs,
    hidden_states,
    hooks,
    list_among_arguments,
    skips,
)
from tests.helpers.pipeline_layers import settings
from tests.helpers.training import make, sgd

STEPS, MICRO = 3, 3


def batches(step: int) -> Iterator[tuple[torch.Tensor]]:
    for micro in range(MICRO):
        yield (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro)),)


def alone(run: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = make(lambda: build(run))
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for (hidden,) in batches(step):
            loss = model(hidden) / MICRO
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        losses.append(sum(float(model(hidden)) for (hidden,) in batches(STEPS)) / MICRO)
    return {name: value.detach().clone() for name, value in model.named_parameters()}, losses


@pytest.mark.parametrize(
    ("run", "pp", "stage", "schedule", "virtual", "interval"),
    [
        (attributes, 2, 1, "1f1b", 1, 0),
        (attributes, 3, 3, "zb_h1", 1, 1),
        (attributes, 2, 2, "1f1b", 1, 2),
        (list_among_arguments, 2, 1, "interleaved_1f1b", 3, 0),
        (hooks, 2, 1, "zbv", 2, 0),
        (hooks, 3, 2, "1f1b", 1, 1),
        (further_outputs, 3, 1, "zb_h1", 1, 0),
        (further_outputs, 2, 3, "1f1b", 1, 1),
        (hidden_states, 3, 1, "1f1b", 1, 1),
        (hidden_states, 2, 1, "zb_h1", 1, 0),
        (skips, 3, 1, "1f1b", 1, 0),
        (skips, 3, 3, "zb_h1", 1, 1),
        (skips, 2, 2, "gpipe", 3, 0),
        (checkpointed, 3, 1, "1f1b", 1, 0),
    ],
)
def test_a_loss_of_all_blocks_trains_as_in_one_process(
    run: Any, pp: int, stage: int, schedule: str, virtual: int, interval: int
) -> None:
    expected, losses = alone(run)

    def job() -> Any:
        config = settings(stage, pp, MICRO, schedule, virtual)
        config["pipeline"]["activation_checkpoint_interval"] = interval
        engine = shoal.initialize(model=make(lambda: build(run)), optimizer=sgd, config=config)[0]
        found = [float(engine.train_batch(batches(step))) for step in range(STEPS)]
        found.append(float(engine.eval_batch(batches(STEPS))))
        return found, engine.module_state_dict()

    for found, values in run_ranks(pp, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_an_output_that_recomputation_joins_with_the_next_one_is_refused_on_all_ranks() -> None:
    def job() -> str:
        config = settings(1, 2, MICRO, "1f1b", 1)
        config["pipeline"]["activation_checkpoint_interval"] = 2
        engine = shoal.initialize(model=make(lambda: build(hidden_states)), optimizer=sgd, config=config)[0]
        with pytest.raises(Exception, match="which is recomputed together") as caught:
            engine.train_batch(batches(0))
        return type(caught.value).__name__

    assert run_ranks(2, job)
