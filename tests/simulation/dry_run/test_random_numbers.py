"""``shoal.verify``: dropout draws equal numbers for what all ranks have, and others for each rank's own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.parallel.tensor.region import RngFork
from shoal.simulation.verify import verify
from tests.simulation.dry_run.test_verify import PLAN, Block, Model

SAME = "the ranks draw the same random numbers, each for its own part or samples: give each another seed"
OTHER = "the ranks draw other random numbers for a tensor that all of them have: their copies differ"


class Dropping(Block):
    """Of what the tensor-parallel ranks have parts of, and of what all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.norm(x))))))


def found(seed: Callable[[Any], int], block: type[Block] = Dropping, num_ranks: int = 4, **parallel: Any) -> set[Any]:
    """Axis and fault of each finding, with the generators seeded by the engine's ranks."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": parallel,
    }

    def train() -> None:
        engine = shoal.initialize(model=Model(block), config=settings)[0]
        torch.manual_seed(seed(engine))
        context = engine.sequence_context or shoal.SequenceContext()
        tokens = context.shard(torch.zeros(2, 8, dtype=torch.long))
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.destroy()

    return {(each.axis, each.what) for each in verify(train, num_ranks).findings}


TP: dict[str, Any] = {"tp": 2, "tp_plan": PLAN}


def by_data(engine: Any) -> int:
    return int(engine.axes.data.rank)


@pytest.mark.parametrize("more", [{}, {"tp_sequence_parallel": True}])
def test_seeds_by_data_parallel_rank_are_right(more: dict[str, Any]) -> None:
    assert found(by_data, **TP, **more) == set()


def test_one_seed_drops_the_same_elements_of_other_samples_and_positions() -> None:
    assert found(lambda engine: 0, num_ranks=4, cp=2) == {("dp_shard", SAME), ("cp", SAME)}


def test_a_seed_of_each_rank_drops_other_elements_of_what_tensor_parallel_ranks_share() -> None:
    assert found(lambda engine: int(engine.global_rank), **TP) == {("tp", OTHER)}


def test_split_activations_need_a_random_state_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RngFork, "begin", lambda fork: None)
    assert found(by_data, **TP) == {("tp", SAME)}


class DropsSamples(Block):
    """Stochastic depth: a number for each sample, for activations of which the ranks have columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden * (torch.rand(len(x), 1, 1) < 0.9))


def test_numbers_for_whole_samples_are_equal_where_samples_are_split() -> None:
    assert found(by_data, DropsSamples, **TP) == set()
    assert found(lambda engine: int(engine.global_rank), DropsSamples, **TP) == {("tp", OTHER)}
