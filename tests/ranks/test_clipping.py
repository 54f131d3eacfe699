"""Clipping asked for by the script: the engine's method, and torch's function, which is an error on several ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.clipping import CLIPPING
from shoal.errors import ShoalError, UsageError
from tests.ranks.models import Plain
from tests.ranks.training import STAGES, are_bit_equal, batch, config, finish, make, start, train_alone, train_ranks

TORCHS = clip_grad._clip_grads_with_norm_
CLIP = 0.5


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
        engine.step()
        engine.destroy()

    run_ranks(2, job)
    assert clip_grad._clip_grads_with_norm_ is TORCHS


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
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_torchs_function_is_restored_by_destroy_of_the_last_engine(order: tuple[int, int]) -> None:
    engines = [run_ranks(1, start, Plain, config(stage))[0] for stage in (1, 3)]
    assert clip_grad._clip_grads_with_norm_ is not TORCHS
    engines[order[0]].destroy()
    assert clip_grad._clip_grads_with_norm_ is not TORCHS
    engines[order[1]].destroy()
    engines[order[1]].destroy()
    assert clip_grad._clip_grads_with_norm_ is TORCHS


def test_it_is_not_replaced_where_initialize_fails() -> None:
    with pytest.raises(ShoalError):
        run_ranks(1, start, Plain, config(3, units={"names": ["missing"]}))
    assert clip_grad._clip_grads_with_norm_ is TORCHS


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
    run_ranks(1, start, Plain, config(1))[0].destroy()
    assert clip_grad._clip_grads_with_norm_ is TORCHS
