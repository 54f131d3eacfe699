"""Reduction is a verb of the unit: what it sums, when backward asks for it, and that all ranks issue the same order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.training import (
    STAGES,
    are_bit_equal,
    assert_ranks_agree,
    batch,
    config,
    finish,
    largest_difference,
    make,
    sgd,
    start,
    train_ranks,
)

UNITS = {"names": ["blocks.*"]}


@dataclass(frozen=True)
class Use:
    """By rank and step, the blocks whose gate takes part in the forward."""

    seed: int = 0
    blocks: int = 3
    share: float = 0.5
    recompute: str = "nothing"

    def gates(self, rank: int, step: int) -> set[int]:
        chosen = random.Random(f"{self.seed} {rank} {step}")
        return {index for index in range(self.blocks) if chosen.random() < self.share}


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor, is_gated: bool) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * (self.gate if is_gated else 1.0)


class Gated(nn.Module):
    """Every rank runs every block; which parameters of a block take part differs by rank and step."""

    def __init__(self, use: Use = Use()) -> None:
        super().__init__()
        self.use = use
        self.embedding = nn.Embedding(models.VOCABULARY, 8)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(use.blocks))
        self.head = nn.Linear(8, models.VOCABULARY, bias=False)
        self.rank: int | None = None
        self.step = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rank = self.rank if self.rank is not None else current_world().rank
        gates = self.use.gates(rank, self.step)
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if self.use.recompute == "nothing":
                x = block(x, index in gates)
            else:
                x = checkpoint(block, x, index in gates, use_reentrant=self.use.recompute == "reentrant")
        self.step += self.rank is None
        return models.cross_entropy(self.head(x), targets)


def trained_alone(use: Use, world: int, steps: int, accumulation: int) -> dict[str, torch.Tensor]:
    model = make(partial(Gated, use))
    optimizer = sgd(model.parameters())
    for index in range(steps * accumulation):
        for rank in range(world):
            model.rank, model.step = rank, index
            (model(*batch(index, rank, world)) / world / accumulation).backward()
        if index % accumulation == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_of_each_block_that_rank_0_alone_uses_trains(stage: int) -> None:
    class OnRankZero(Use):
        def gates(self, rank: int, step: int) -> set[int]:
            return {0, 1, 2} if rank == 0 else set()

    results = train_ranks(2, partial(Gated, OnRankZero()), config(stage, units=UNITS), steps=3)
    assert_ranks_agree(results)
    assert largest_difference(results[0].parameters, trained_alone(OnRankZero(), 2, 3, 1)) <= 1e-5


@settings(max_examples=12, deadline=None)
@given(
    use=st.builds(
        Use,
        seed=st.integers(0, 10**6),
        blocks=st.integers(1, 4),
        share=st.sampled_from([0.2, 0.5, 0.8]),
        recompute=st.sampled_from(["nothing", "nothing", "kept", "reentrant"]),
    ),
    world=st.integers(2, 3),
    accumulation=st.integers(1, 2),
)
def test_ranks_that_use_different_parameters_train_as_one_process_at_every_stage(
    use: Use, world: int, accumulation: int
) -> None:
    alone = trained_alone(use, world, 2, accumulation)
    sections = {"gradient_accumulation_steps": accumulation, "units": UNITS}
    found = {}
    for stage in STAGES:
        results = train_ranks(world, partial(Gated, use), config(stage, **sections), steps=2)
        assert_ranks_agree(results)
        assert largest_difference(results[0].parameters, alone) <= 1e-5
        found[stage] = results[0].parameters
    for one, other in [(0, 1), (2, 3)] if accumulation > 1 else [(0, 1), (1, 2), (2, 3)]:
        assert are_bit_equal(found[one], found[other])


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_gives_no_weight_gradient_reduces_nothing(stage: int) -> None:
    def job() -> tuple[list[str], dict[str, torch.Tensor]]:
        engine = start(models.Plain, config(stage))
        tokens, targets = batch(0, current_world().rank, 2)
        engine(tokens, targets)  # finds reads of other units' parameters
        with current_world().recorder.recording() as entries:
            x = torch.randn(2, models.SEQUENCE, models.HIDDEN, requires_grad=True)
            hook = engine.module.embedding.register_forward_hook(lambda *_: x)
            loss = engine(tokens[:2], targets[:2])
            hook.remove()
            (gradient,) = torch.autograd.grad(loss, [x])
        assert gradient.abs().sum() > 0
        for index in range(2):
            engine.backward(engine(*batch(index, current_world().rank, 2)))
            engine.step()
        return [entry.op for entry in entries if entry.op != "all_gather"], finish(engine, []).parameters

    def plain() -> dict[str, torch.Tensor]:
        engine = start(models.Plain, config(stage))
        for index in range(2):
            engine.backward(engine(*batch(index, current_world().rank, 2)))
            engine.step()
        return finish(engine, []).parameters

    for (reductions, parameters), expected in zip(run_ranks(2, job), run_ranks(2, plain), strict=True):
        assert reductions == []
        assert are_bit_equal(parameters, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_weight_gradients_that_arrive_without_hooks_are_reduced_by_the_verb(stage: int) -> None:
    """A schedule's separate weight pass: gradients are computed separately and assigned."""

    def job(is_apart: bool) -> dict[str, torch.Tensor]:
        engine = start(models.Plain, config(stage, units=UNITS))
        for index in range(2):
            engine.sharded.reducer.at_step = True
            loss = engine.scale(engine(*batch(index, current_world().rank, 2)))
            if is_apart:
                units = engine.sharded.units
                trained = [p for unit in units for p in unit.trained_parameters]
                with engine.sharded.gathered([unit for unit in units if unit.is_sharded]):
                    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                    for parameter, gradient in zip(trained, gradients, strict=True):
                        parameter.grad = gradient
                engine.sharded.begin_backward()
                for unit in units:
                    unit.reduce(at_step=True)
                    unit.wait_reduced(at_step=True)
                engine.sharded.finish_backward()
            else:
                loss.backward()
            engine.step()
        return finish(engine, []).parameters

    for found, expected in zip(run_ranks(2, job, True), run_ranks(2, job, False), strict=True):
        assert are_bit_equal(found, expected)


def test_at_stage_3_a_unit_is_reduced_before_the_next_is_gathered_on_every_rank() -> None:
    def job() -> list[list[Any]]:
        engine = start(partial(Gated, Use(seed=3)), config(3, units=UNITS))
        found = []
        for index in range(3):
            with current_world().recorder.recording() as entries:
                engine.backward(engine(*batch(index, current_world().rank, 2)))
            found.append([(entry.op, entry.label) for entry in entries])
            engine.step()
        engine.destroy()
        return found

    first, second = run_ranks(2, job)
    assert first == second
    for ops in first:
        backward = ops[len(ops) - ops[::-1].index(("all_gather", "blocks.2")) - 1 :]
        reduced = backward.index(("reduce_scatter", "blocks.2"))
        assert reduced < backward.index(("reduce_scatter", "blocks.1")) < backward.index(("reduce_scatter", "blocks.0"))
