"""Loops that users write around a model: each trains as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world

ROWS, WORLD, STEPS, HIDDEN = 2, 2, 3, 16
BOUND = 2e-5  # on parameters, after three steps of SGD in fp32


class Opaque:
    """An output in which no tensor can be found from outside."""

    __slots__ = ("loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Experts(nn.Module):
    """Blocks that are containers: their own forward never runs. Which expert runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(HIDDEN, 4),
                    "experts": nn.ModuleList(
                        nn.Sequential(nn.Linear(HIDDEN, 256), nn.GELU(), nn.Linear(256, HIDDEN)) for _ in range(4)
                    ),
                }
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> Opaque:
        x = self.entrance(x)
        for block in self.blocks:
            parts: Any = block
            weight, chosen = parts["gate"](x).softmax(-1).max(-1)
            added = torch.zeros_like(x)
            for index, expert in enumerate(parts["experts"]):
                mine = chosen == index
                if mine.any():
                    added[mine] = expert(x[mine]) * weight[mine].unsqueeze(-1)
            x = x + added
        return Opaque(x.pow(2).mean())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(HIDDEN, 64), nn.Tanh(), nn.Linear(64, HIDDEN)) for _ in range(3)]
        )
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.head(self.blocks(x))
        return score


def rows(index: int, rank: int) -> torch.Tensor:
    whole = torch.randn(ROWS * WORLD, HIDDEN, generator=torch.Generator().manual_seed(index))
    return whole[rank * ROWS : (rank + 1) * ROWS]


def opaque_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).loss
    return loss


def penalised_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient penalty of WGAN-GP: the loss holds a gradient, so backward passes the model twice."""
    x = x.clone().requires_grad_()
    score = model(x).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).pow(2).mean() + 0.01 * score


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compare(
    factory: Callable[[], nn.Module], loss_of: Callable[[Any, torch.Tensor], torch.Tensor], stage: int, *, held: bool
) -> None:
    torch.manual_seed(0)
    model = factory()
    start = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    for index in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rows(index, rank)) for rank in range(WORLD)]).mean().backward()
        optimizer.step()

    def job() -> dict[str, torch.Tensor]:
        mine = factory()
        mine.load_state_dict(start)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.0,
            "units": {"names": ["blocks.*"]},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine = shoal.initialize(model=mine, optimizer=sgd(mine), config=config)[0]
        for index in range(STEPS):
            whole = shoal.zero.GatheredParameters(list(mine.parameters())) if held else nullcontext()
            with whole:
                engine.backward(loss_of(engine, rows(index, current_world().rank)))
            engine.step()
        engine.destroy()
        return {name: parameter.detach() for name, parameter in mine.named_parameters()}

    for found in run_ranks(WORLD, job):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), atol=BOUND, rtol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_whose_forward_never_runs_train_though_the_output_is_opaque(stage: int) -> None:
    compare(Experts, opaque_loss, stage, held=False)


@pytest.mark.parametrize(("stage", "held"), [(0, False), (1, False), (2, False), (3, True)])
def test_a_gradient_penalty_trains_as_in_one_process(stage: int, held: bool) -> None:
    """At stage 3 the parameters are held whole around it: no hook tells when the second pass reads them."""
    compare(Critic, penalised_loss, stage, held=held)
