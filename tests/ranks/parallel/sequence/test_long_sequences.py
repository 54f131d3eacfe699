"""Tiled modules and the fused loss under ZeRO: the numbers of the plain model, and each unit reduced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.loss import linear_cross_entropy, sequence_parallel_cross_entropy
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.tiled import tile_modules
from tests.helpers import models
from tests.helpers.comm_cases import current_dp
from tests.helpers.training import (
    STAGES,
    Factory,
    Trained,
    assert_ranks_agree,
    config,
    finish,
    largest_difference,
    micro_step,
    run_steps,
    start,
    train_ranks,
)


class Fused(models.Plain):
    """The loss in chunks; the weight is the embedding's, which another unit owns."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)))
        return linear_cross_entropy(hidden, self.head.weight, targets, chunk_tokens=3)


class Untied(models.Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = torch.nn.Linear(models.HIDDEN, models.VOCABULARY)


class FusedUntied(Untied):
    """The loss in chunks; the head's weight is read while the root runs, and the head never runs."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)))
        return linear_cross_entropy(hidden, self.head.weight, targets, self.head.bias, chunk_tokens=3)


def train_tiled(
    factory: Factory, settings: dict[str, Any], classes: Any, *, recomputed: bool = False, steps: int = 2
) -> Trained:
    engine = start(factory, settings)
    tiles = tile_modules(engine.module, classes, tile_tokens=2)
    blocks = recompute_blocks(engine.module, "blocks.*") if recomputed else None
    losses = run_steps(engine, steps)
    if blocks is not None:
        blocks.remove()
    tiles.remove()
    return finish(engine, losses)


def assert_alike(ours: list[Trained], theirs: list[Trained]) -> None:
    assert_ranks_agree(ours)
    for mine, plain in zip(ours, theirs, strict=True):
        assert largest_difference(mine.parameters, plain.parameters) <= 1e-6
        assert mine.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize(("fused", "plain"), [(Fused, models.Plain), (FusedUntied, Untied)])
@pytest.mark.parametrize("stage", STAGES)
def test_the_fused_loss_trains_as_logits_and_cross_entropy_do(stage: int, fused: Factory, plain: Factory) -> None:
    settings = config(stage, gradient_accumulation_steps=2, units={"names": ["blocks.*", "head"]})
    assert_alike(train_ranks(2, fused, settings, steps=2), train_ranks(2, plain, settings, steps=2))


@pytest.mark.parametrize(
    ("stage", "factory", "classes", "units", "recomputed"),
    [
        *((stage, models.Plain, "blocks.*", "blocks.*", False) for stage in STAGES),
        (3, models.Plain, "blocks.*", "blocks.*.up", False),  # a unit inside a tiled module
        (0, models.Plain, "Linear", "blocks.*", False),
        (3, models.Plain, "Linear", "blocks.*", False),
        *((3, models.Plain, "blocks.*", units, True) for units in ("blocks.*", "blocks.*.up")),
        *((stage, models.Adapted, "blocks.*", "blocks.*", False) for stage in (2, 3)),
        (3, models.Adapted, "blocks.*", "blocks.*", True),
        (3, models.FrozenBottom, "blocks.*", "blocks.*", False),
        (3, models.Shared, "blocks.*", "blocks.*", False),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_tiled_modules_train_as_whole_ones_do(
    stage: int, factory: Factory, classes: str, units: str, recomputed: bool
) -> None:
    settings = config(stage, units={"names": [units]})
    ours = run_ranks(2, lambda: train_tiled(factory, settings, classes, recomputed=recomputed))
    assert_alike(ours, train_ranks(2, factory, settings, steps=2))


@pytest.mark.parametrize("stage", STAGES)
def test_tiles_issue_the_collectives_of_whole_modules(stage: int) -> None:
    def step(classes: str | None) -> list[Entry]:
        engine = start(models.Plain, config(stage))
        tiles = tile_modules(engine.module, classes, tile_tokens=1) if classes else None
        run_steps(engine, 2)
        with current_world().recorder.recording() as entries:
            micro_step(engine, 2)
        if tiles is not None:
            tiles.remove()
        engine.destroy()
        return entries

    def issued(entries: list[Entry]) -> list[tuple[str, str, int]]:
        return [(entry.op, entry.label, entry.nbytes) for entry in entries]

    whole, in_tiles = run_ranks(2, lambda: step(None)), run_ranks(2, lambda: step("blocks.*"))
    assert [issued(entries) for entries in in_tiles] == [issued(entries) for entries in whole]
    reduced = [label for op, label, _ in issued(in_tiles[0]) if op in ("all_reduce", "reduce_scatter")]
    assert sorted(reduced) == ["blocks.0", "blocks.1", "blocks.2", "root"]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0},
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(10, 10), (4, 9, 7), (20, 1, 1, 1)], ids=str)
def test_ranks_with_a_range_of_the_vocabulary_each_compute_the_whole_loss(
    sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    tokens, width = 11, 6
    hidden = torch.randn(tokens, width)
    weight, bias = 5 * torch.randn(sum(sizes), width), torch.randn(sum(sizes))
    targets = torch.randint(0, sum(sizes), (tokens,))
    targets[3] = -100
    gradient = torch.linspace(1, 2, tokens) if options.get("reduction") == "none" else torch.tensor(2.0)
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def compute(rows: slice, **more: Any) -> tuple[torch.Tensor, ...]:
        inputs = [each.clone().requires_grad_() for each in (hidden, weight[rows], bias[rows])]
        loss = linear_cross_entropy(inputs[0], inputs[1], targets, inputs[2], **options, **more)
        return (loss.detach(), *torch.autograd.grad(loss, inputs, gradient))

    def job() -> tuple[tuple[torch.Tensor, ...], list[Entry]]:
        comm = current_dp()
        rows = slice(starts[comm.rank], starts[comm.rank] + sizes[comm.rank])
        with current_world().recorder.recording() as entries:
            found = compute(rows, comm=comm, vocabulary_start=starts[comm.rank], chunk_tokens=4)
        return found, entries

    expected = compute(slice(None))
    for rank, ((loss, d_hidden, d_weight, d_bias), entries) in enumerate(run_ranks(len(sizes), job)):
        rows = slice(starts[rank], starts[rank] + sizes[rank])
        wanted = (expected[0], expected[1], expected[2][rows], expected[3][rows])
        torch.testing.assert_close((loss, d_hidden, d_weight, d_bias), wanted, rtol=1e-5, atol=1e-5)
        num_chunks = 3 * (2 if options.get("reduction") == "none" else 1)
        assert [entry.op for entry in entries] == ["all_gather"] * num_chunks + ["all_reduce"]


def test_a_sequence_divided_among_ranks_has_the_loss_of_every_token_on_each() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 2, 7), torch.randint(0, 7, (6, 2))
    targets[1, 1] = -100

    def job() -> tuple[torch.Tensor, torch.Tensor]:
        comm = current_dp()
        mine = logits.chunk(comm.size)[comm.rank].clone().requires_grad_()
        losses = sequence_parallel_cross_entropy(mine, targets.chunk(comm.size)[comm.rank], comm)
        return losses.detach(), torch.autograd.grad(losses.sum(), mine)[0]

    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(6, 2)
    gradients = torch.autograd.grad(expected.sum(), whole)[0].chunk(3)
    for (losses, gradient), wanted in zip(run_ranks(3, job), gradients, strict=True):
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(gradient, wanted)
