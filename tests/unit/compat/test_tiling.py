"""DeepSpeed's tiled computing, called as its users call it, against the whole computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from shoal.compat.deepspeed.sequence.cross_entropy import (
    vocab_sequence_parallel_cross_entropy,
)
from shoal.errors import UsageError
from shoal.mesh import Mesh

WIDTH, CLASSES = 4, 7


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))

    def loss(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="none")
        return (losses if mask is None else losses * mask.flatten()).sum()


@pytest.fixture
def module() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def check(module: nn.Module, x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    read = [x, *module.parameters()]
    gradient = torch.linspace(1, 2, ours.numel()).view(ours.shape)
    mine = torch.autograd.grad(ours, read, gradient, allow_unused=True)
    torch.testing.assert_close(mine, torch.autograd.grad(theirs, read, gradient, allow_unused=True))


@pytest.mark.parametrize("names_parameters", [True, False])
@pytest.mark.parametrize("shape", [(1, 9, WIDTH), (2, 9, WIDTH), (9, WIDTH)])
def test_tiled_mlp(module: Mlp, shape: tuple[int, ...], names_parameters: bool) -> None:
    x = torch.randn(shape, requires_grad=True)
    parameters = [*module.up.parameters(), *module.down.parameters()] if names_parameters else None
    check(module, x, TiledMLP.apply(lambda self, x: self.forward(x), module, x, 4, parameters), module(x))


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_tiled_fused_logits_loss(module: Mlp, reduction: str, has_mask: bool) -> None:
    x, y = torch.randn(2, 6, WIDTH, requires_grad=True), torch.randint(0, CLASSES, (2, 6))
    mask = torch.rand(2, 6) if has_mask else None
    parameters = [*module.head.parameters()]
    ours = TiledFusedLogitsLoss.apply(Mlp.loss, module, x, y, mask, 3, parameters, reduction)
    check(module, x, ours, module.loss(x, y, mask) / (3 if reduction == "mean" else 1))


@pytest.mark.parametrize("names_parameters", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean", None])
def test_sequence_tiled_compute_of_losses(module: Mlp, reduction: str | None, names_parameters: bool) -> None:
    x, y = torch.randn(2, 7, WIDTH, requires_grad=True), torch.randint(0, CLASSES, (2, 7))

    def fn(x: Tensor, y: Tensor, model: Mlp, factor: float) -> Tensor:
        return factor * model.loss(x, y)

    parameters = [*module.head.parameters()] if names_parameters else None
    ours = sequence_tiled_compute(
        fn, 7, 3, {"x": x, "y": y}, {"model": module, "factor": 0.5}, "x", parameters, 0, reduction
    )
    by_tile = torch.stack([fn(*tiles, module, 0.5) for tiles in zip(x.split(3, 1), y.split(3, 1), strict=True)])
    reduce: Callable[[Tensor], Tensor] = {"sum": torch.sum, "mean": torch.mean, None: lambda each: each}[reduction]
    check(module, x, ours, reduce(by_tile))


@pytest.mark.parametrize("reduction", ["sum", "mean", None])
def test_sequence_tiled_compute_of_positions(module: Mlp, reduction: str | None) -> None:
    x = torch.randn(2, 7, WIDTH, requires_grad=True)
    arguments: list[Any] = [lambda x: module(x), 7, 3, ["x"], [], "x", None, 1, reduction, x]
    reduce: Callable[[Tensor], Tensor] = {"sum": torch.sum, "mean": torch.mean, None: lambda each: each}[reduction]
    check(module, x, SequenceTiledCompute.apply(*arguments), reduce(module(x)))


def test_vocab_sequence_parallel_cross_entropy() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 2, CLASSES), torch.randint(0, CLASSES, (6, 2))

    def job() -> Tensor:
        world = current_world()
        group = world.process_group("sp", Mesh.of(world.size, sp=world.size))
        mine = (each.chunk(world.size)[world.rank] for each in (logits, target))
        losses: Tensor = vocab_sequence_parallel_cross_entropy(*mine, group)
        return losses

    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(6, 2)
    for losses in run_ranks(2, job):
        torch.testing.assert_close(losses, expected)


def test_wrong_arguments_are_refused(module: Mlp) -> None:
    x, y = torch.randn(2, 7, WIDTH), torch.randint(0, CLASSES, (2, 6))
    with pytest.raises(UsageError, match="output_reduction is 'max'"):
        sequence_tiled_compute(module, 7, 2, {"x": x}, {}, "x", output_reduction="max")
    with pytest.raises(UsageError, match=r"seqlen is 8, and 'x' has the shape \(2, 7, 4\)"):
        sequence_tiled_compute(module, 8, 2, {"x": x}, {}, "x")
    with pytest.raises(UsageError, match=r"the shapes \(2, 7, 4\), \(2, 6\)"):
        TiledFusedLogitsLoss.apply(Mlp.loss, module, x, y, None, 2, None, "sum")
