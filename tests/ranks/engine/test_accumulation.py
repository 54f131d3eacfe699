"""Accumulation, its boundaries, and several backward passes in one micro-step, at every stage."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.helpers import models
from tests.helpers.training import (
    ROWS,
    STAGES,
    batch,
    config,
    finish,
    largest_difference,
    make,
    micro_step,
    run_steps,
    sgd,
    start,
    train_alone,
)


def accumulated_by_hand(engine: shoal.Engine, how: str) -> None:
    """Three steps of two micro-batches, said in another way than by ``gradient_accumulation_steps``."""
    world = current_world()
    for step in range(3):
        first, second = (batch(2 * step + micro, world.rank, world.size) for micro in range(2))
        if how == "no_sync":
            with engine.no_sync():
                engine.backward(engine(*first))
                engine.step()
            engine.backward(engine(*second))
            engine.step()
        elif how == "explicit boundary":
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(*first) / 2, scale_wrt_gas=False)
            engine.step()
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(*second) / 2, scale_wrt_gas=False)
            engine.step()
        elif how == "unmanaged":
            engine.backward(engine(*first) / 2)
            engine.backward(engine(*second) / 2)
            engine.step()
        elif how == "unmanaged, loss.backward":
            (engine(*first) / 2).backward()
            (engine(*second) / 2).backward()
            engine.step()
        else:
            raise AssertionError(how)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("how", ["no_sync", "explicit boundary", "unmanaged", "unmanaged, loss.backward"])
def test_accumulation_said_in_any_way_gives_the_same_parameters(how: str, world: int) -> None:
    alone = train_alone(models.Plain, world=world, accumulation=2, clip=0.5)

    def job(stage: int) -> tuple[dict[str, torch.Tensor], int]:
        settings = config(
            stage,
            gradient_accumulation_steps=2 if how == "no_sync" else 1,
            managed_gradient_accumulation="unmanaged" not in how,
            gradient_clipping=0.5,
        )
        engine = start(models.Plain, settings)
        accumulated_by_hand(engine, how)
        steps = engine.global_steps
        return finish(engine, []).parameters, steps

    for stage in STAGES:
        for parameters, steps in run_ranks(world, job, stage):
            assert steps == 3
            assert largest_difference(parameters, alone.parameters) <= 1e-5


def test_no_sync_communicates_no_gradient_at_any_stage() -> None:
    def job(stage: int) -> list[str]:
        engine = start(models.Plain, config(stage, gradient_accumulation_steps=2))
        run_steps(engine, 1)
        with engine.no_sync():
            loss = engine(*batch(2, current_world().rank, 2))
            with current_world().recorder.recording() as entries:
                engine.backward(loss)
                engine.step()
        ops = [entry.op for entry in entries if entry.op != "all_gather"]
        micro_step(engine, 3)
        engine.destroy()
        return ops

    for stage in STAGES:
        assert run_ranks(2, job, stage) == [[], []]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_was_added_up_without_communication_is_reduced_where_it_is(stage: int) -> None:
    def job(is_quiet: bool) -> tuple[int, int]:
        engine = start(models.Plain, config(stage, bf16={"enabled": True}, gradient_accumulation_steps=2))
        for step in range(2):
            with engine.no_sync() if is_quiet else nullcontext():
                micro_step(engine, 2 * step)
            micro_step(engine, 2 * step + 1)
        (staging,) = {group.gradient._staging for group in engine.sharded.trained_groups}
        nbytes = staging.nbytes, sum(group.gradient.unsynced.full.nbytes for group in engine.sharded.trained_groups)
        engine.destroy()
        return nbytes

    assert run_ranks(2, job, True) == [(0, 0)] * 2
    assert all(nbytes > 0 and not unsynced for nbytes, unsynced in run_ranks(2, job, False))


def test_a_pass_without_communication_after_a_reduced_one_adds_to_its_gradient() -> None:
    def job(stage: int, *, is_quiet: bool) -> dict[str, torch.Tensor]:
        engine = start(models.Plain, config(stage))
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        with engine.no_sync() if is_quiet else nullcontext():
            engine.backward(engine(*batch(1, current_world().rank, 2)))
        engine.step()
        return finish(engine, []).parameters

    for stage in STAGES:
        loud, quiet = (run_ranks(2, partial(job, stage, is_quiet=is_quiet)) for is_quiet in (False, True))
        for one, other in zip(loud, quiet, strict=True):
            assert largest_difference(one, other) <= 1e-6


def test_set_train_batch_size_changes_the_accumulation_steps() -> None:
    alone = train_alone(models.Plain, world=2, accumulation=3, steps=2)

    def job(stage: int) -> tuple[tuple[int, int, int], dict[str, torch.Tensor]]:
        engine = start(models.Plain, config(stage))
        before = engine.train_batch_size()
        engine.set_train_batch_size(3 * ROWS * 2)
        run_steps(engine, 2)
        numbers = (before, engine.train_batch_size(), engine.gradient_accumulation_steps())
        return numbers, finish(engine, []).parameters

    for stage in STAGES:
        for numbers, parameters in run_ranks(2, job, stage):
            assert numbers == (4, 12, 3)
            assert largest_difference(parameters, alone.parameters) <= 1e-5


# Several backward passes in one micro-step


def two_losses(model: nn.Module, index: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two forward passes."""
    return model(*batch(2 * index, rank, world)), model(*batch(2 * index + 1, rank, world))


@pytest.mark.parametrize("how", ["two backward calls", "one graph twice", "nested in a hook"])
@pytest.mark.parametrize("world", [1, 2])
def test_several_backward_passes_in_one_micro_step_are_summed(how: str, world: int) -> None:
    def losses_backward(model: nn.Module, step: int, rank: int, backward: Any, scale: float) -> None:
        if how == "two backward calls":
            for loss in two_losses(model, step, rank, world):
                backward(loss * scale)
        elif how == "one graph twice":
            loss = model(*batch(step, rank, world)) * scale
            backward(loss, retain_graph=True)
            backward(loss)
        else:
            inner, outer = (loss * scale for loss in two_losses(model, step, rank, world))
            outer.register_hook(lambda gradient: inner.backward())
            backward(outer)

    model = make(models.Plain)
    optimizer = sgd(model.parameters())
    for step in range(3):
        for rank in range(world):
            losses_backward(model, step, rank, lambda loss, **kwargs: loss.backward(**kwargs), 1 / world)
        optimizer.step()
        optimizer.zero_grad()
    alone = {name: p.detach() for name, p in model.named_parameters()}

    def job(stage: int, style: str) -> dict[str, torch.Tensor]:
        engine = start(models.Plain, config(stage))
        backward = engine.backward if style == "engine" else (lambda loss, **kwargs: loss.backward(**kwargs))
        for step in range(3):
            losses_backward(engine, step, current_world().rank, backward, 1.0)
            engine.step()
        return finish(engine, []).parameters

    for stage in STAGES:
        for style in ("engine", "plain"):
            for found in run_ranks(world, job, stage, style):
                assert largest_difference(found, alone) <= 1e-5
