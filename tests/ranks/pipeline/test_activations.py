"""A rank holds the activations of as many micro-batches as its schedule says, and no more."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.simulate import simulate
from tests.helpers.pipeline_layers import Layers, settings
from tests.helpers.training import sgd


class Held:
    """How many graphs of a rank's layers are alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, node: Any) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(node, self._remove)

    def _remove(self) -> None:
        self.now -= 1


class Token:
    """Lives as long as the graph that has it."""


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.token = Token()
        held.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Counted(nn.Module):
    """A layer whose weight's path through the graph is counted: with a split backward it lives until W."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.ones(1)), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * Identity.apply(self.weight, self.held)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("interleaved_zero_bubble", 2), ("zbv", 2),
        ("dualpipev", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_holds_as_many_activations_as_the_schedule_says(schedule: str, virtual: int, stage: int) -> None:
    ranks, num_micro = 4, 8
    made = build_schedule(schedule, ranks, num_micro, virtual_stages=virtual)

    def job() -> int:
        held = Held()
        layers = [Counted(held) for _ in range(made.num_stages)]
        model = Layers(layers, range(made.num_stages), made.stages_of(current_world().rank), tied=False)
        config = settings(stage, ranks, num_micro, schedule, virtual)
        engine: Any = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]
        for _ in range(2):
            engine.train_batch((torch.ones(1, 2), torch.zeros(1, 2)) for _ in range(num_micro))
            assert held.now == 0
        return held.peak

    assert run_ranks(ranks, job) == list(simulate(made).peak_activations)
