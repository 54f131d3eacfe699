"""Blocks under `torch.compile`, at every stage, and a whole model, over every axis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from tests.helpers import models
from tests.helpers.compiling import CountsGraphs, compiling
from tests.helpers.composition import AXES, settings_of
from tests.helpers.composition_runs import check_run
from tests.helpers.training import config, finish, largest_difference, run_steps, start, train_alone


def compiled_blocks(backend: CountsGraphs, how: str) -> nn.Module:
    """More blocks than torch keeps graphs of one function: they must share."""
    model = models.Plain(num_blocks=10)
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend, dynamic=False)
        else:
            model.blocks[index] = torch.compile(block, backend=backend, dynamic=False)
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize(
    ("backend", "world", "stage"),
    [("eager", 2, 0), ("eager", 2, 1), ("eager", 2, 2), ("eager", 2, 3), ("aot_eager", 2, 3), ("aot_eager", 1, 3)],
)
def test_compiled_blocks_train_alike_and_are_not_compiled_again_after_the_second_step(
    backend: str, world: int, stage: int, how: str
) -> None:
    alone = train_alone(lambda: models.Plain(num_blocks=10), world=world, steps=5)
    counting = CountsGraphs(backend)

    def job() -> tuple[dict[str, torch.Tensor], int, int]:
        engine = start(lambda: compiled_blocks(counting, how), config(stage))
        run_steps(engine, 2)
        after_two_steps = counting.num_graphs
        run_steps(engine, 3, first=2)
        return finish(engine, []).parameters, after_two_steps, counting.num_graphs

    with compiling():
        results = run_ranks(world, job)
    for parameters, after_two_steps, in_the_end in results:
        assert 1 <= after_two_steps == in_the_end <= 3
        plain_names = {name.replace("_orig_mod.", ""): value for name, value in parameters.items()}
        assert largest_difference(plain_names, alone.parameters) <= 1e-5


@pytest.mark.parametrize("axis", [{"tp": "2"}, {"tp": "2 split"}, {"sp": "2"}, {"cp": "2"}], ids=str)
def test_a_compiled_model_over_ranks_ends_where_one_process_ends(axis: dict[str, str]) -> None:
    plain = {name: next(iter(values)) for name, values in AXES.items()}
    settings, run = settings_of({**plain, "stage": "3", **axis})
    check_run(settings, replace(run, compiled="model", steps=3, blocks=2))
