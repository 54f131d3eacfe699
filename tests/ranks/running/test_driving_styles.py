"""The three ways in which clients drive an engine take the steps that one process takes, at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.models import Plain
from tests.helpers.training import ROWS, STAGES, adamw, batch, config, make

RANKS, ACCUMULATION, STEPS, CLIP = 2, 3, 4, 0.05

Drive = Callable[[shoal.Engine, list[tuple[torch.Tensor, torch.Tensor]]], None]


def accelerate(engine: shoal.Engine, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Accelerate and Trainer: the boundary is said, the loss is divided by the caller, one ``step()`` a step."""
    for index, (inputs, targets) in enumerate(micro_batches):
        is_last = index + 1 == len(micro_batches)
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        engine.backward(engine(inputs, targets) / len(micro_batches), scale_wrt_gas=False)
        if is_last:
            engine.step()
    engine.zero_grad()


def lightning(engine: shoal.Engine, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Lightning and plain scripts: ``step()`` after every micro-batch; the engine counts and divides."""
    for inputs, targets in micro_batches:
        engine.backward(engine(inputs, targets))
        engine.step()


def fabric(engine: shoal.Engine, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Fabric as it is with DeepSpeed: the optimizer's own ``step()`` and ``zero_grad()``, once a step."""
    for inputs, targets in micro_batches:
        engine.backward(engine(inputs, targets))
    engine.optimizer.step()
    engine.optimizer.zero_grad()


STYLES: dict[str, Drive] = {"accelerate": accelerate, "lightning": lightning, "fabric": fabric}


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def alone(model: nn.Module) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Norms before clipping, learning rates after each step, and the parameters, of plain PyTorch on all the data."""
    optimizer = adamw(list(model.parameters()))
    schedule = rates(optimizer)
    norms, learning_rates = [], []
    for step in range(STEPS):
        for index in range(ACCUMULATION):
            inputs, targets = batch(step * ACCUMULATION + index, 0, 1)
            whole = [batch(step * ACCUMULATION + index, rank, RANKS) for rank in range(RANKS)]
            inputs, targets = torch.cat([i for i, _ in whole]), torch.cat([t for _, t in whole])
            (model(inputs, targets) / ACCUMULATION).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        learning_rates.append(optimizer.param_groups[0]["lr"])
    return norms, learning_rates, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_counts_clips_scales_and_schedules_as_one_process_does(style: str, stage: int) -> None:
    model = make(Plain)
    norms, learning_rates, expected = alone(copy.deepcopy(model))

    def train() -> None:
        rank = current_world().rank
        engine, optimizer, _, schedule = shoal.initialize(
            model=copy.deepcopy(model),
            optimizer=adamw,
            lr_scheduler=rates,
            config=config(stage, gradient_accumulation_steps=ACCUMULATION, gradient_clipping=CLIP),
        )
        assert optimizer is engine.optimizer
        for step in range(STEPS):
            STYLES[style](engine, [batch(step * ACCUMULATION + i, rank, RANKS) for i in range(ACCUMULATION)])
            assert engine.global_steps == step + 1
            assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-4)
            assert engine.get_lr() == [pytest.approx(learning_rates[step])]
            assert schedule.get_last_lr() == engine.get_lr()
        assert engine.global_samples == STEPS * ACCUMULATION * ROWS * RANKS
        values = engine.module_state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)
        engine.destroy()

    run_ranks(RANKS, train)


@pytest.mark.parametrize("stage", [1, 3])
def test_without_its_schedule_the_engine_leaves_the_rate_to_the_client(stage: int) -> None:
    model = make(Plain)

    def train() -> None:
        rank = current_world().rank
        engine, *_ = shoal.initialize(
            model=copy.deepcopy(model), optimizer=adamw, lr_scheduler=rates, config=config(stage)
        )
        before = engine.get_lr()
        engine.lr_scheduler = None
        lightning(engine, [batch(0, rank, RANKS)])
        assert engine.get_lr() == before
        engine.destroy()

    run_ranks(RANKS, train)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_step_of_the_optimizer_that_was_given_says_what_to_call(stage: int, precision: str) -> None:
    """The engine's own step, schedules made from it before and after, and the time after ``destroy`` are as before."""

    def job() -> None:
        model = make(Plain)
        given = adamw(list(model.parameters()))
        before = rates(given)
        settings = config(stage, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
        engine, returned, *_ = shoal.initialize(model=model, optimizer=given, config=settings)
        after = rates(given)
        for _ in range(2):
            engine.backward(engine(*batch(0, current_world().rank, RANKS)))
            with pytest.raises(UsageError, match=r"\[optimizer-client-step\] step\(\) of the AdamW (.|\n)*engine.step"):
                given.step()
            engine.step()
            before.step()
            after.step()
        with engine.no_sync():
            engine.backward(engine(*batch(0, current_world().rank, RANKS)))  # leaves gradients of this rank alone
        with pytest.raises(UsageError, match=r"\[optimizer-client-step\]"):
            given.step()
        engine.zero_grad()
        engine.backward(engine(*batch(0, current_world().rank, RANKS)))
        returned.step()
        assert engine.global_steps == 3
        engine.destroy()
        weight = nn.Parameter(torch.ones(2))
        given.param_groups[0]["params"] = [weight]
        weight.grad = torch.ones(2)
        given.step()
        assert (weight < 1).all()

    run_ranks(RANKS, job)
