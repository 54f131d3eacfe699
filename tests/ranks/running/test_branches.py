"""Models whose branches run by the data, so that ranks differ in what they compute."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.training import (
    STAGES,
    assert_like_alone,
    assert_ranks_agree,
    batch,
    config,
    largest_difference,
    make,
    sgd,
    train_alone,
    train_ranks,
)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_block_that_runs_by_the_data_trains_as_in_one_process(accumulation: int) -> None:
    alone = train_alone(models.Branching, world=3, accumulation=accumulation, steps=4)
    for stage in STAGES:
        # Stage 3 gathers what runs, so all ranks must run the same units: one unit has both branches.
        settings = config(stage, gradient_accumulation_steps=accumulation, units={"names": ["blocks"]})
        assert_like_alone(train_ranks(3, models.Branching, settings, steps=4), alone, atol=1e-5)
    for stage in (0, 1, 2):
        settings = config(stage, gradient_accumulation_steps=accumulation)
        assert_like_alone(train_ranks(3, models.Branching, settings, steps=4), alone, atol=1e-5)


class RankBranches(models.Plain):
    """Rank 0 skips the second block, rank 1 the third, in every step."""

    rank: int | None = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        rank = self.rank if self.rank is not None else current_world().rank
        for index, block in enumerate(self.blocks):
            if index != rank + 1:
                x = block(x)
        return x


def test_ranks_whose_branches_differ_neither_hang_nor_mix() -> None:
    model = make(RankBranches)
    optimizer = sgd(model.parameters())
    for step in range(4):
        for rank in range(3):
            model.rank = rank
            (model(*batch(step, rank, 3)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = {name: p.detach() for name, p in model.named_parameters()}
    for stage in (0, 1, 2):
        results = train_ranks(3, RankBranches, config(stage), steps=4)
        assert_ranks_agree(results)
        assert largest_difference(results[0].parameters, alone) <= 1e-5
    results = train_ranks(3, RankBranches, config(3, units={"names": ["blocks"]}), steps=4)
    assert_ranks_agree(results)
    assert largest_difference(results[0].parameters, alone) <= 1e-5


def test_at_stage_3_units_that_only_some_ranks_run_are_named_and_do_not_hang() -> None:
    with pytest.raises(shoal.errors.CommError, match=r"blocks\.[12]"):
        train_ranks(3, RankBranches, config(3), steps=4)
