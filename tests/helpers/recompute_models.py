"""A small model whose blocks are recomputed, and runs of it that can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.comm.world import current_world
from shoal.parallel import recompute
from shoal.parallel.recompute import Recompute, RecomputeSettings, recompute_blocks
from shoal.parallel.selective import operations_of

ROWS, HIDDEN = 5, 8


X_NBYTES = ROWS * HIDDEN * 4


PLACES = {
    "in place": RecomputeSettings(),
    "on the host": RecomputeSettings(is_offloaded=True),
    "timed": RecomputeSettings(has_times=True),
    "matmuls kept": RecomputeSettings(operations=operations_of("matmul")),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(x)))) * scale
        return x + (y if mask is None else y * mask)


class Chain(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, 0.5, mask=mask)
        return x.sum()


class Trained(NamedTuple):
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


def run(model: nn.Module, *inputs: Any, **kwargs: Any) -> Trained:
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(*inputs, **kwargs)
    loss.backward()
    return Trained(loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()])


def assert_same(ours: Trained, plain: Trained) -> None:
    assert torch.equal(ours.loss, plain.loss)
    assert len(ours.gradients) == len(plain.gradients)
    for mine, theirs in zip(ours.gradients, plain.gradients, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@contextmanager
def recomputed(model: nn.Module, settings: RecomputeSettings, **kwargs: Any) -> Iterator[Recompute]:
    made = Recompute(settings, **kwargs)
    blocks = recompute_blocks(model, Block, recompute=made)
    try:
        yield made
    finally:
        blocks.remove()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.ones(ROWS, 1).expand(ROWS, HIDDEN)


def unconfigure() -> None:
    recompute.uninstall(recompute.current_recompute(), current_world())
    assert not recompute.is_configured()


class Mpu:
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank
