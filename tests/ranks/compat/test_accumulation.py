"""How scripts of DeepSpeed's accumulate: blocks that are reduced once, and steps whose end the script decides."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed.runtime.entry import initialize
from shoal.errors import UsageError
from tests.helpers.models import Plain
from tests.helpers.training import BF16, STAGES, adamw, batch, config, make, sgd, start

pytestmark = pytest.mark.usefixtures("deepspeed_classes")


def under_deepspeeds_name(stage: int, **sections: Any) -> Any:
    engine = start(Plain, config(stage, **sections), sgd)
    engine.follows_deepspeed = True
    return engine


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_block_of_backward_passes_is_reduced_once_when_it_ends(stage: int, sections: dict[str, Any]) -> None:
    def train(*, in_block: bool) -> tuple[list[str], list[Any], dict[str, torch.Tensor]]:
        engine = under_deepspeeds_name(stage, **sections)
        rank = current_world().rank
        with engine.world.recorder.recording() as entries:
            with engine.coalesce_grad_reduction() if in_block else nullcontext():
                for index in range(3):
                    engine.backward(engine(*batch(index, rank, 2)))
        ops = [entry.op for entry in entries if entry.op not in ("all_gather", "exchange")]
        gradients = [engine.access.full_gradient(p) for p in engine.module.parameters()]
        engine.step()
        assert engine.was_step_applied()
        weights = engine.module_state_dict()
        engine.destroy()
        return ops, gradients, weights

    def both() -> tuple[Any, Any]:
        return train(in_block=True), train(in_block=False)

    (blocked, passes), (other, _) = run_ranks(2, both)
    assert 0 < len(blocked[0]) == len(passes[0]) / 3  # at the boundary every pass outside of a block is reduced
    for mine, its, alone in zip(blocked[1], other[1], passes[1], strict=True):
        if alone is not None:
            assert torch.equal(mine, its)
            torch.testing.assert_close(mine, alone, atol=2e-2 if sections else 1e-6, rtol=2e-2 if sections else 1e-5)
    for name, value in blocked[2].items():
        torch.testing.assert_close(value, passes[2][name], atol=1e-2 if sections else 1e-6, rtol=1e-2)


def test_the_block_of_an_error_reduces_nothing_and_an_empty_one_neither() -> None:
    def job() -> None:
        engine = under_deepspeeds_name(2)
        with engine.world.recorder.recording() as entries:
            with engine.coalesce_grad_reduction():
                pass
            loss = engine(*batch(0, current_world().rank, 2))
            with suppress(KeyError), engine.coalesce_grad_reduction():
                engine.backward(loss)
                raise KeyError
        assert not [entry.op for entry in entries]
        engine.step()
        assert engine.global_steps == 1
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_are_refused_where_deepspeed_refuses_them(stage: int) -> None:
    engine = under_deepspeeds_name(stage)
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0, 0, 1)))
        with pytest.raises(AssertionError, match="coalesce_grad_reduction cannot be nested"):
            engine.coalesce_grad_reduction().__enter__()
        with pytest.raises(AssertionError, match="reentry is unsupported" if stage < 2 else "gradient partitioning"):
            engine.no_sync().__enter__()
        with pytest.raises(AssertionError, match=r"illegal to call Engine\.step\(\) inside no_sync"):
            engine.step()
    engine.step()
    engine.destroy()


def test_under_its_own_name_blocks_nest() -> None:
    engine = start(Plain, config(2), sgd)
    with engine.coalesce_grad_reduction(), engine.no_sync(), engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0, 0, 1)))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def unmanaged(stage: int, **sections: Any) -> dict[str, Any]:
    return config(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2, **sections)


@pytest.mark.parametrize("stage", STAGES)
def test_the_script_that_decides_the_boundary_is_told_what_contradicts_it(stage: int) -> None:
    engine, *_ = initialize(model=make(Plain), optimizer=adamw, config=unmanaged(stage), dist_init_required=False)
    with pytest.raises(AssertionError, match="set_gradient_accumulation_boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(UsageError, match="managed_gradient_accumulation=False"):
        engine.coalesce_grad_reduction().__enter__()
    engine.backward(engine(*batch(0, 0, 1)))
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.was_step_applied()) == (1, True)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_direct_backward_of_a_script_that_decides_the_boundary_is_refused_at_stage_0(stage: int) -> None:
    engine, *_ = initialize(model=make(Plain), optimizer=adamw, config=unmanaged(stage), dist_init_required=False)
    for begin in (lambda loss: loss, engine.scale):
        if stage == 0:
            with pytest.raises(RuntimeError, match=r"Direct calls to tensor.backward\(\) are not supported"):
                begin(engine(*batch(0, 0, 1))).backward()
            engine.backward(engine(*batch(0, 0, 1)))
        else:
            begin(engine(*batch(0, 0, 1))).backward()
        engine.step()
    assert engine.global_steps == 2
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_overlap_comm_of_a_script_that_decides_the_boundary_is_refused_below_stage_2(stage: int) -> None:
    settings = unmanaged(stage, zero_optimization={"overlap_comm": True})
    if stage < 2:
        with pytest.raises(AssertionError, match="supports ZeRO overlap_comm only with ZeRO stage 2"):
            initialize(model=make(Plain), optimizer=adamw, config=settings, dist_init_required=False)
    else:
        initialize(model=make(Plain), optimizer=adamw, config=settings, dist_init_required=False)[0].destroy()
    shoal.initialize(model=make(Plain), optimizer=adamw, config=settings)[0].destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_divided_by_the_accumulation_steps_however_backward_is_called(stage: int) -> None:
    def norm(how: str) -> float:
        engine = start(Plain, unmanaged(stage), sgd)
        loss = engine(*batch(0, 0, 1))
        engine.backward(loss) if how == "engine" else (engine.scale(loss) if how == "scale" else loss).backward()
        engine.step()
        found = engine.get_global_grad_norm()
        engine.destroy()
        return float(found)

    assert norm("engine") == pytest.approx(norm("plain"), rel=1e-6) == pytest.approx(norm("scale"), rel=1e-6)


def test_a_micro_batch_between_two_boundaries_applies_no_step() -> None:
    engine = start(Plain, config(1, gradient_accumulation_steps=2), sgd)
    applied = []
    for index in range(4):
        engine.backward(engine(*batch(index, 0, 1)))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]
    engine.destroy()
