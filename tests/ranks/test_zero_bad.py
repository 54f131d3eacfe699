"""What goes wrong ends in an error of Shoal's own, on every rank, that says where; and what can go on goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import (
    CommError,
    ConfigError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    OutOfMemoryError,
    RankFailedError,
    ShoalError,
    UsageError,
)
from tests.ranks.models import Plain
from tests.ranks.training import (
    STAGES,
    are_bit_equal,
    batch,
    config,
    finish,
    make,
    masters,
    micro_step,
    run_steps,
    sgd,
    start,
    train_ranks,
)


def poisoned_step(engine: shoal.Engine, index: int, bad_rank: int, value: float = float("nan")) -> None:
    """A micro-step in which one rank's loss is not finite."""
    world = current_world()
    loss = engine(*batch(index, world.rank, world.size))
    engine.backward(loss * value if world.rank == bad_rank else loss)
    engine.step()


# Losses and gradients that are not finite


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_loss_of_one_rank_is_raised_on_all_and_training_can_go_on(stage: int, value: float) -> None:
    def job() -> tuple[str, bool, int, int, dict[str, torch.Tensor]]:
        engine = start(Plain, config(stage))
        run_steps(engine, 2)
        before = masters(engine)
        with pytest.raises(NonFiniteError) as caught:
            poisoned_step(engine, 2, bad_rank=1, value=value)
        untouched = are_bit_equal(before, masters(engine))
        run_steps(engine, 2, first=3)
        numbers = (engine.global_steps, engine.skipped_steps)
        return str(caught.value), untouched, *numbers, finish(engine, []).parameters

    results = run_ranks(3, job)

    # What training without the bad step gives.
    def without() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage))
        for index in (0, 1, 3, 4):
            micro_step(engine, index)
        return finish(engine, []).parameters

    results, expected = run_ranks(3, job), run_ranks(3, without)[0]
    for message, untouched, _, skipped, parameters in results:
        assert "the loss of rank 1 is not finite" in message
        assert "rank 1, step 2" in message
        assert "first parameter 'embedding.weight'" in message
        assert untouched
        assert skipped == 1
        assert are_bit_equal(parameters, expected)


def test_a_nan_loss_is_found_even_where_its_gradients_are_finite() -> None:
    def job(stage: int) -> str:
        engine = start(Plain, config(stage))
        loss = engine(*batch(0, current_world().rank, 2))
        engine.backward(loss + float("nan"))
        with pytest.raises(NonFiniteError) as caught:
            engine.step()
        engine.destroy()
        return caught.value.what

    for stage in STAGES:
        assert run_ranks(2, job, stage) == ["the loss of rank 0, 1 is not finite."] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_bad_steps_can_be_skipped_with_a_warning(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    def job() -> tuple[bool, int, int, bool]:
        engine = start(Plain, config(stage, precision={"nonfinite": "skip"}))
        run_steps(engine, 1)
        before = masters(engine)
        poisoned_step(engine, 1, bad_rank=0)
        untouched = are_bit_equal(before, masters(engine))
        applied = engine.was_step_applied()
        run_steps(engine, 1, first=2)
        moved = not are_bit_equal(before, masters(engine))
        engine.destroy()
        return untouched and not applied, engine.skipped_steps, engine.global_steps, moved

    assert run_ranks(2, job) == [(True, 1, 3, True)] * 2
    assert any("step 1 skipped: the loss of rank 0 is not finite" in record.message for record in caplog.records)


def test_bad_steps_are_applied_when_the_user_asks_for_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    def job(stage: int) -> tuple[bool, int]:
        engine = start(Plain, config(stage, precision={"nonfinite": "warn"}))
        poisoned_step(engine, 0, bad_rank=0)
        value = masters(engine)["blocks.0.up.weight"]
        engine.destroy()
        return bool(value.isnan().all()), engine.skipped_steps

    for stage in STAGES:
        assert run_ranks(2, job, stage) == [(True, 0)] * 2
    assert any("applied all the same" in record.message for record in caplog.records)


FP16 = {"enabled": True, "initial_scale_power": 4}


@pytest.mark.parametrize(("policy", "limit"), [("raise", 1), ("skip", 10)])
@pytest.mark.parametrize("sections", [{}, {"fp16": FP16}], ids=["fp32", "fp16"])
def test_the_file_says_how_many_bad_losses_in_a_row_are_too_many(
    sections: dict[str, Any], policy: str, limit: int
) -> None:
    def job() -> int:
        engine = start(Plain, config(2, precision={"nonfinite": policy}, **sections))
        for index in range(limit - 1):
            poisoned_step(engine, index, bad_rank=0)
        with pytest.raises(NonFiniteError, match="not finite" if limit == 1 else f"{limit} steps in a row"):
            poisoned_step(engine, limit - 1, bad_rank=0)
        engine.destroy()
        return engine.skipped_steps

    assert run_ranks(2, job) == [limit, limit]


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


@pytest.mark.parametrize("stage", STAGES)
def test_bad_gradients_of_a_good_loss_skip_the_step_on_all_ranks(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    def job() -> tuple[bool, int]:
        engine = start(Plain, config(stage))
        before = masters(engine)
        world = current_world()
        loss = engine(*batch(0, world.rank, world.size))
        engine.backward(BadGradient.apply(loss) if world.rank == 1 else loss)
        engine.step()
        untouched = are_bit_equal(before, masters(engine))
        engine.destroy()
        return untouched, engine.skipped_steps

    assert run_ranks(2, job) == [(True, 1)] * 2
    assert any("the gradients are not finite though the loss is" in record.message for record in caplog.records)


# fp16


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_fp16_overflow_skips_steps_halves_the_scale_and_doubles_it_again_after_the_window(
    stage: int, world: int
) -> None:
    section = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3}

    def job() -> tuple[list[float], list[int], list[bool]]:
        engine = start(Plain, config(stage, fp16=section))
        scales, skipped, moved = [], [], []
        before = masters(engine)
        for index in range(8):
            micro_step(engine, index)
            after = masters(engine)
            scales.append(engine.loss_scale)
            skipped.append(engine.skipped_steps)
            moved.append(not are_bit_equal(before, after))
            before = after
        engine.destroy()
        return scales, skipped, moved

    for scales, skipped, moved in run_ranks(world, job):
        overflows = [now > last for last, now in zip([0, *skipped[:-1]], skipped, strict=True)]
        assert moved == [not overflow for overflow in overflows]
        assert overflows == [True] * 4 + [False] * 4
        # 2^18 is too much for this model's gradients in fp16, 2^14 is not; it grows after three clean steps.
        assert scales == [2.0**17, 2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14, 2.0**15]


def test_fp16_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def job(stage: int) -> tuple[int, float, bool]:
        section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        engine = start(Plain, config(stage, fp16=section))
        before = masters(engine)
        world = current_world()
        loss = engine(*batch(0, world.rank, world.size))
        engine.backward(BadGradient.apply(loss) if world.rank == 1 else loss)
        engine.step()
        untouched = are_bit_equal(before, masters(engine))
        scale = engine.loss_scale
        engine.destroy()
        return engine.skipped_steps, scale, untouched

    for stage in STAGES:
        assert run_ranks(3, job, stage) == [(1, 8.0, True)] * 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_loss_under_fp16_is_named_each_time_and_raised_at_the_third_in_a_row(
    stage: int, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    def job() -> tuple[str, int, bool]:
        engine = start(Plain, config(stage, fp16=FP16))
        poisoned_step(engine, 0, bad_rank=1, value=value)
        poisoned_step(engine, 1, bad_rank=1, value=value)
        micro_step(engine, 2)  # a good one: the count begins anew
        before = masters(engine)
        poisoned_step(engine, 3, bad_rank=1, value=value)
        poisoned_step(engine, 4, bad_rank=1, value=value)
        with pytest.raises(NonFiniteError) as caught:
            poisoned_step(engine, 5, bad_rank=1, value=value)
        untouched = are_bit_equal(before, masters(engine))
        skipped = engine.skipped_steps
        engine.destroy()
        return str(caught.value), skipped, untouched

    for message, skipped, untouched in run_ranks(2, job):
        assert "the loss of rank 1 is not finite. 3 steps in a row." in message
        assert "rank 1, step 5, first parameter 'embedding.weight'" in message
        assert (skipped, untouched) == (5, True)
    warned = [r.message for r in caplog.records if r.levelname == "WARNING" and "skipped" in r.message]
    assert [text[:46] for text in warned[::2]] == [
        f"step {n} skipped: the loss of rank 1 is not fini" for n in (0, 1, 3, 4)
    ]


def test_overflows_under_fp16_may_go_on_for_longer_than_bad_losses() -> None:
    def job() -> int:
        engine = start(Plain, config(2, fp16={"enabled": True, "initial_scale_power": 30}))
        for index in range(12):
            loss = engine(*batch(index, current_world().rank, 2))
            engine.backward(BadGradient.apply(loss))
            engine.step()
        engine.destroy()
        return engine.skipped_steps

    assert run_ranks(2, job) == [12, 12]


# A rank that raises


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad sample in backward")


def raise_on_rank_1(stage: int, phase: str, style: str) -> tuple[list[Any], float]:
    """Train on three ranks until rank 1 raises in the middle of ``phase``.

    Returns: what each rank saw, and after how many seconds.
    """
    seen: list[Any] = [None] * 3
    began = time.monotonic()

    def job() -> None:
        rank = current_world().rank
        try:
            engine = start(Plain, config(stage))
            run_steps(engine, 2)
            if rank == 1 and phase == "backward":
                engine.module.blocks[1].register_forward_hook(lambda module, args, output: Raises.apply(output))
            elif rank == 1:
                engine.module.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
            run_steps(engine, 2, first=2, style=style)
        except BaseException as error:
            seen[rank] = error
            raise

    with pytest.raises((ValueError, ZeroDivisionError)):
        run_ranks(3, job)
    return seen, time.monotonic() - began


@pytest.mark.parametrize("style", ["engine", "plain"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_raises_in_the_middle_stops_all_with_its_traceback(stage: int, phase: str, style: str) -> None:
    seen, seconds = raise_on_rank_1(stage, phase, style)
    assert isinstance(seen[1], ValueError if phase == "backward" else ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(seen[rank], RankFailedError)
        assert seen[rank].failed_rank == 1
        assert ("a bad sample in backward" if phase == "backward" else "1 / 0") in seen[rank].remote_traceback
    assert seconds < 20


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_after_an_error_that_all_ranks_caught_training_goes_on_as_if_nothing_had_been(stage: int, world: int) -> None:
    def job(fails: bool) -> tuple[dict[str, torch.Tensor], set[str]]:
        engine = start(Plain, config(stage))
        run_steps(engine, 2)
        if fails:
            rank = current_world().rank
            for phase in ("forward", "backward"):
                block = engine.module.blocks[1]
                if phase == "forward":
                    handle = block.register_forward_hook(lambda module, args, output: 1 / 0)
                else:
                    handle = block.register_forward_hook(lambda module, args, output: Raises.apply(output))
                with pytest.raises((ZeroDivisionError, ValueError)):
                    engine.backward(engine(*batch(7, rank, world)))
                handle.remove()
        states = {unit.state.value for unit in engine.sharded.sharded}
        run_steps(engine, 3, first=2)
        return finish(engine, []).parameters, states

    plain, failed = run_ranks(world, job, False), run_ranks(world, job, True)
    for (expected, _), (parameters, states) in zip(plain, failed, strict=True):
        assert states <= {"RESTING"}
        assert are_bit_equal(parameters, expected)


def test_an_error_inside_gathered_parameters_leaves_every_unit_at_rest() -> None:
    def job() -> list[tuple[str, int]]:
        engine = start(Plain, config(3))
        run_steps(engine, 1)
        handle = engine.module.blocks[1].register_forward_hook(lambda module, args, output: 1 / 0)
        with pytest.raises(ZeroDivisionError), shoal.zero.GatheredParameters(engine.module.blocks[0].parameters()):
            engine(*batch(1, 0, 1))
        handle.remove()
        run_steps(engine, 2, first=1)
        states = [(unit.state.value, unit.holds) for unit in engine.sharded.sharded]
        engine.destroy()
        return states

    for states in run_ranks(2, job):
        assert states == [("RESTING", 0)] * 4


# Models and optimizers that cannot be trained


def alone(job: Callable[[], Any]) -> Any:
    return run_ranks(1, job)[0]


def initialize(model: Any, settings: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return shoal.initialize(model=model, config=settings or config(3), **kwargs)


ADAM = config(3, optimizer={"type": "Adam", "params": {"lr": 1e-3}})


@pytest.mark.parametrize("settings", [config(0), ADAM], ids=["no optimizer", "an optimizer of the config"])
def test_an_empty_model_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="Sequential has no parameters"):
        alone(lambda: initialize(nn.Sequential(), settings))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_are_an_error_that_names_them() -> None:
    with pytest.raises(ModelError, match=r"2 parameters have no shape yet: 0\.weight, 0\.bias"):
        alone(lambda: initialize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))))


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, got int"):
        alone(lambda: initialize(3))


def test_no_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no config was given"):
        alone(lambda: shoal.initialize(model=Plain()))


def test_a_parameter_in_two_groups_is_an_error_that_names_it() -> None:
    def job() -> None:
        model = Plain()
        groups = [{"params": list(model.parameters())}, {"params": [model.blocks[0].up.weight]}]
        initialize(model, ADAM, model_parameters=groups)

    with pytest.raises(OptimizerError, match=r"'blocks\.0\.up\.weight' is in group 0 and again in group 1"):
        alone(job)


def test_a_parameter_that_is_not_in_the_model_is_an_error() -> None:
    with pytest.raises(OptimizerError, match=r"group 0 holds a parameter \(position 1, shape \(5,\)\)"):
        alone(lambda: initialize(model := Plain(), optimizer=sgd([model.norm.weight, nn.Parameter(torch.zeros(5))])))


def test_an_optimizer_of_another_type_is_an_error() -> None:
    with pytest.raises(OptimizerError, match="got str"):
        alone(lambda: initialize(Plain(), optimizer="adam"))


def test_a_frozen_model_with_an_optimizer_is_an_error() -> None:
    with pytest.raises(OptimizerError, match="no parameter requires a gradient"):
        alone(lambda: initialize(Plain().requires_grad_(False), ADAM))


def test_units_that_are_not_in_the_model_are_an_error_with_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"'Blok'.*Block"):
        alone(lambda: initialize(Plain(), config(3, units={"classes": ["Blok"], "names": []})))
    with pytest.raises(ModelError, match=r"'block\.\*'"):
        alone(lambda: initialize(Plain(), config(3, units={"names": ["block.*"]})))


def test_ranks_with_different_models_or_configs_are_told_which() -> None:
    def other_model() -> None:
        start(lambda: Plain(hidden=12 if current_world().rank != 2 else 8), config(2))

    with pytest.raises(ModelError, match="rank 2 has another model than the others"):
        run_ranks(4, other_model)

    def other_config() -> None:
        start(Plain, config(2, gradient_clipping=float(current_world().rank == 1)))

    with pytest.raises(ConfigError, match="rank 1 has another config than the others"):
        run_ranks(4, other_config)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_changed_after_initialize_is_an_error_that_names_the_change(stage: int) -> None:
    def job() -> tuple[str, str]:
        engine = start(Plain, config(stage))
        run_steps(engine, 3)
        messages = []
        engine.module.late = nn.Linear(2, 2)
        with pytest.raises(ModelError) as caught:
            engine(*batch(3, 0, 1))
        messages.append(str(caught.value))
        del engine.module.late
        engine.module.blocks[0].up.weight = nn.Parameter(torch.zeros(24, 12))
        with pytest.raises(ModelError) as caught:
            [engine(*batch(index, 0, 1)) for index in range(64)]  # compared parameter by parameter now and then only
        messages.append(str(caught.value))
        engine.destroy()
        return messages[0], messages[1]

    for first, second in run_ranks(2, job):
        assert "added 'late.weight', added 'late.bias'" in first
        assert "added 'blocks.0.up.weight', removed 'blocks.0.up.weight'" in second


def test_unused_parameters_are_an_error_where_the_config_says_so() -> None:
    for kind in (ModelError, AssertionError):
        with pytest.raises(kind, match=r"2 parameters got no gradient on any rank: unused\.weight, unused\.bias"):
            train_ranks(2, Plain, config(2, zero_optimization={"ignore_unused_parameters": False}))


# The API called in a way that cannot work


def test_wrong_calls_are_usage_errors() -> None:
    def job(stage: int) -> list[str]:
        engine = start(Plain, config(stage))
        inputs = batch(0, current_world().rank, 2)
        codes = []

        def fails(call: Callable[[], Any], kind: type[ShoalError] = UsageError) -> None:
            with pytest.raises(kind) as caught:
                call()
            codes.append(caught.value.code)

        fails(engine.step)
        fails(lambda: engine.backward(engine.module.logits(inputs[0]) if stage < 3 else torch.ones(2)))
        fails(lambda: engine.backward(3.0))
        fails(lambda: engine.backward(torch.zeros(())))
        with torch.no_grad():
            fails(lambda: engine.backward(engine(*inputs)))
        fails(lambda: engine.set_train_batch_size(5), ConfigError)
        engine.backward(engine(*inputs))
        fails(lambda: engine.set_train_batch_size(8))
        engine.step()
        engine.backward(engine(*inputs))
        engine(*inputs).backward()
        fails(engine.step)
        run_steps(engine, 2)
        fails(lambda: engine.optimizer.step(lambda: 0.0), OptimizerError)
        fails(lambda: engine.optimizer.add_param_group({"params": []}), OptimizerError)
        engine.destroy()
        engine.destroy()
        fails(lambda: engine(*inputs))
        fails(lambda: engine.backward(torch.zeros((), requires_grad=True)))
        fails(engine.step)
        return codes

    for stage in STAGES:
        for codes in run_ranks(2, job, stage):
            assert codes == [
                "step-without-backward",
                "loss-shape",
                "loss-shape",
                "loss-detached",
                "loss-detached",
                "batch-size",
                "batch-size-mid-step",
                "mixed-backward",
                "optimizer-closure",
                "optimizer-add-group",
                "engine-destroyed",
                "engine-destroyed",
                "engine-destroyed",
            ]


def test_an_engine_without_an_optimizer_evaluates_but_does_not_train() -> None:
    def job(stage: int) -> tuple[float, float]:
        engine = start(Plain, config(stage), None)
        assert engine.optimizer is None
        with torch.no_grad():
            loss = float(engine(*batch(0, 0, 1)))
        with pytest.raises(UsageError, match="needs an optimizer"):
            engine.backward(engine(*batch(0, 0, 1)))
        engine.destroy()
        return loss, float(make(Plain)(*batch(0, 0, 1)).detach())

    for stage in STAGES:
        for loss, expected in run_ranks(2, job, stage):
            assert loss == expected


class TooLarge(Plain):
    is_too_large = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_too_large:
            torch.empty(1 << 62, dtype=torch.uint8)
        return super().body(x)


@pytest.mark.parametrize("stage", STAGES)
def test_an_out_of_memory_error_comes_with_the_ledger_and_the_change_that_saves_most(stage: int) -> None:
    def job() -> OutOfMemoryError:
        engine = start(TooLarge, config(stage))
        run_steps(engine, 1)
        engine.module.is_too_large = True
        with pytest.raises(OutOfMemoryError) as caught:
            engine(*batch(1, 0, 1))
        engine.module.is_too_large = False
        run_steps(engine, 1, first=1)
        engine.destroy()
        return caught.value

    for error in run_ranks(2, job):
        assert "no memory left in forward" in error.what
        assert "bytes per parameter" in error.what
        assert "DefaultCPUAllocator" in error.what
        assert "step 1" in error.where
        assert isinstance(error.__cause__, RuntimeError)
        # On CPU everything in the process counts, so for a model this small the rest is what saves most.
        assert 'halve "train_micro_batch_size_per_gpu" (2)' in error.do


def test_a_destroyed_engine_gives_the_model_back_whole_and_without_hooks() -> None:
    def job(stage: int) -> tuple[float, float, int]:
        engine = start(Plain, config(stage))
        run_steps(engine, 2)
        model = engine.module
        with torch.no_grad():
            last = float(engine(*batch(5, 0, 1)))
        engine.destroy()
        hooks = sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in model.modules()
        )
        loss = model(*batch(5, 0, 1))
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if "unused" not in name)
        return last, float(loss.detach()), hooks

    for stage in STAGES:
        for last, now, hooks in run_ranks(2, job, stage):
            assert last == now
            assert hooks == 0


def test_one_rank_that_leaves_early_is_named_by_the_others() -> None:
    def job() -> None:
        engine = start(Plain, config(3))
        run_steps(engine, 1 if current_world().rank == 1 else 2)

    with pytest.raises(CommError, match="rank 1"):
        run_ranks(2, job)
