"""Clipping asked for by the script: the engine's method, and torch's function, which is an error on several ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.parts.clipping import _REPLACED, CLIPPING
from shoal.errors import ShoalError, UsageError
from shoal.zero import safe_get_full_grad, safe_set_full_grad
from tests.helpers.models import Plain
from tests.helpers.training import (
    STAGES,
    are_bit_equal,
    batch,
    config,
    finish,
    make,
    sgd,
    start,
    train_alone,
    train_ranks,
)

CLIP, VALUE = 0.5, 0.01


def is_replaced() -> bool:
    """Whether torch's functions are; both are, or none."""
    (is_replaced,) = {replaced.cell.cell_contents is not replaced.wrapper.__wrapped__ for replaced in _REPLACED}
    return is_replaced


@pytest.fixture(autouse=True)
def _no_engine_of_an_earlier_test() -> None:
    """Tests of failures leave engines behind that are not destroyed."""
    for owner in list(CLIPPING._steps):
        CLIPPING.remove(owner)
    CLIPPING.is_error = True


def backward(engine: shoal.Engine, index: int = 0) -> None:
    engine.backward(engine(*batch(index, current_world().rank, current_world().size)))


def clipped_by_hand(settings: dict[str, Any], steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = start(Plain, settings)
    norms = []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            backward(engine, step * engine.gradient_accumulation_steps() + micro)
            if engine.is_gradient_accumulation_boundary():
                norms.append(float(engine.clip_grad_norm_(CLIP)))
            engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-6)
    return finish(engine, []).parameters, norms


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_the_engines_method_clips_as_the_config_and_returns_the_norm_of_one_process(
    stage: int, world: int, accumulation: int
) -> None:
    settings = config(stage, gradient_accumulation_steps=accumulation)
    alone = train_alone(Plain, world=world, accumulation=accumulation, clip=CLIP)
    by_config = train_ranks(world, Plain, {**settings, "gradient_clipping": CLIP})
    for (parameters, norms), expected in zip(run_ranks(world, clipped_by_hand, settings), by_config, strict=True):
        assert are_bit_equal(parameters, expected.parameters)
        assert norms == pytest.approx(alone.norms, rel=1e-5)


@pytest.mark.parametrize("precision", [{"fp16": {"enabled": True, "loss_scale": 128}}, {"bf16": {"enabled": True}}])
def test_it_clips_where_state_is_offloaded_and_the_update_began_before(precision: dict[str, Any]) -> None:
    offload = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    settings = config(3, zero_optimization=offload, **precision)
    by_config = train_ranks(2, Plain, {**settings, "gradient_clipping": CLIP})
    for (parameters, norms), expected in zip(run_ranks(2, clipped_by_hand, settings), by_config, strict=True):
        assert are_bit_equal(parameters, expected.parameters)
        assert norms == pytest.approx(expected.norms, rel=1e-6)


def test_the_smaller_of_both_norms_counts_infinity_only_asks_and_the_next_step_is_not_clipped() -> None:
    def job(asked: tuple[float, ...], clip: float) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2, gradient_clipping=clip))
        for index in range(2):
            backward(engine, index)
            if index == 0:
                for value in asked:
                    engine.clip_grad_norm_(value)
            engine.step()
        return finish(engine, []).parameters

    def both(asked: tuple[float, ...], clip: float) -> dict[str, torch.Tensor]:
        return run_ranks(2, job, asked, clip)[0]

    assert are_bit_equal(both((0.5, 2.0), 0.25), both((), 0.25))
    assert are_bit_equal(both((math.inf,), 0.0), both((), 0.0))
    assert not are_bit_equal(both((0.25,), 0.0), both((), 0.25))  # which clips the second step too
    assert are_bit_equal(both((0.1, 0.25), 0.0), both((0.1,), 0.0))


def test_the_method_between_two_steps_or_in_an_earlier_micro_batch_is_an_error() -> None:
    def job() -> None:
        engine = start(Plain, config(2, gradient_accumulation_steps=2))
        backward(engine)
        with pytest.raises(UsageError, match=r"micro-batch 1 of 2") as early:
            engine.clip_grad_norm_(CLIP)
        engine.step()
        backward(engine, 1)
        engine.step()
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        with pytest.raises(UsageError, match=r"clip_grad_norm_\(\) was called without a backward") as late:
            engine.clip_grad_norm_(CLIP)
        assert (early.value.code, late.value.code) == ("clip-mid-step", "step-without-backward")
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_function_on_several_ranks_is_an_error_that_names_the_method(stage: int) -> None:
    def job() -> None:
        engine = start(Plain, config(stage))
        assert clip_grad_norm_(engine.module.parameters(), CLIP) == 0  # no gradient yet
        backward(engine)
        for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            with pytest.raises(UsageError, match=r"engine\.clip_grad_norm_\(max_norm\)") as caught:
                clip(engine.module.parameters(), CLIP)
            assert caught.value.code == "clip-engine"
        for clip in (clip_grad_value_, torch.nn.utils.clip_grad_value_):
            with pytest.raises(UsageError, match=r"clip_grad_value_\(\) has no effect") as caught:
                clip(engine.module.parameters(), VALUE)
            assert caught.value.code == "clip-engine"
        engine.step()
        engine.destroy()

    run_ranks(2, job)
    assert not is_replaced()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_value_as_the_error_says_and_on_one_rank_by_torchs_function(stage: int, world: int) -> None:
    def alone() -> dict[str, torch.Tensor]:
        model = make(Plain)
        optimizer = sgd(model.parameters())
        for step in range(2):
            model(*batch(step, 0, 1) if world == 1 else whole(step)).backward()
            clip_grad_value_(model.parameters(), VALUE)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def whole(step: int) -> Any:
        return tuple(map(torch.cat, zip(*(batch(step, rank, world) for rank in range(world)), strict=True)))

    def job() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage))
        for step in range(2):
            backward(engine, step)
            if world == 1:
                clip_grad_value_(engine.module.parameters(), VALUE)
            else:
                for name, parameter in engine.module.named_parameters():
                    if name.startswith("unused."):
                        continue
                    gradient = safe_get_full_grad(parameter)
                    assert gradient is not None
                    safe_set_full_grad(parameter, gradient.clamp(-VALUE, VALUE))
            engine.step()
        return finish(engine, []).parameters

    expected = alone()
    for parameters in run_ranks(world, job):
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_torchs_function_on_gradients_of_one_rank_alone_is_an_error(stage: int) -> None:
    def job() -> None:
        engine = start(Plain, config(stage, gradient_accumulation_steps=2))
        with engine.no_sync():
            backward(engine)
        assert any(parameter.grad is not None for parameter in engine.module.parameters())
        for clip in (clip_grad_norm_, clip_grad_value_):
            with pytest.raises(UsageError, match=r"clip_grad_\w+\(\) would clip each rank by its own gradients"):
                clip(engine.module.parameters(), 0.1)
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_norm_over_tensor_parallel_ranks_is_an_error_and_its_values_are_clipped(stage: int) -> None:
    def job() -> None:
        model = make(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        split = {"tp": 2, "tp_plan": {"0": "colwise", "1": "rowwise"}}
        settings = {**config(stage), "parallel": split, "units": {}}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        with pytest.raises(UsageError, match=r"clip_grad_norm_\(\) would clip each rank by its own gradients"):
            clip_grad_norm_(engine.module.parameters(), 0.1)
        clip_grad_value_(engine.module.parameters(), 0.1)
        assert max(float(parameter.grad.abs().max()) for parameter in engine.module.parameters()) < 0.1001
        engine.step()
        engine.destroy()

    run_ranks(2, job)


def test_torchs_function_on_one_rank_clips_the_engines_gradients() -> None:
    def job() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2))
        backward(engine)
        norm = clip_grad_norm_(engine.module.parameters(), CLIP)
        assert norm > CLIP
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(CLIP, rel=1e-4)
        return finish(engine, []).parameters

    run_ranks(1, job)


def test_other_parameters_are_clipped_by_torch_while_an_engine_lives() -> None:
    def job() -> None:
        engine = start(Plain, config(2))
        backward(engine)
        other = make(lambda: nn.Linear(4, 4))
        assert clip_grad_norm_(other.parameters(), 1.0) == 0
        other(torch.ones(1, 4)).sum().backward()
        assert clip_grad_norm_(iter(other.parameters()), 1.0) > 1
        torch.testing.assert_close(clip_grad_norm_(other.weight, 9.0), other.weight.grad.norm())
        clip_grad_value_(other.parameters(), clip_value=0.1)
        assert other.weight.grad.abs().max() == 0.1
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_torchs_function_is_restored_by_destroy_of_the_last_engine(order: tuple[int, int]) -> None:
    engines = [run_ranks(1, start, Plain, config(stage))[0] for stage in (1, 3)]
    assert is_replaced()
    engines[order[0]].destroy()
    assert is_replaced()
    engines[order[1]].destroy()
    engines[order[1]].destroy()
    assert not is_replaced()


def test_it_is_not_replaced_where_initialize_fails() -> None:
    with pytest.raises(ShoalError):
        run_ranks(1, start, Plain, config(3, units={"names": ["missing"]}))
    assert not is_replaced()


def test_another_replacement_made_while_an_engine_lives_stays_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = run_ranks(1, start, Plain, config(1))[0]
    checked = clip_grad._clip_grads_with_norm_
    calls = []

    def another(*args: Any) -> None:
        calls.append(args)
        checked(*args)

    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", another)
    engine.destroy()
    assert clip_grad._clip_grads_with_norm_ is another
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    clip_grad_norm_(other.parameters(), 1.0)
    assert len(calls) == 1
    torch.testing.assert_close(clip_grad_norm_(other.parameters(), 9.0), torch.tensor(1.0))
    monkeypatch.undo()
    assert not is_replaced()
