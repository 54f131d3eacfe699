"""What DeepSpeed's clients ask of the engine and of the optimizer, beside training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.engine import DeepSpeedEngine
from shoal.compat.engine_names import DERIVED, NOT_HERE, PATHS
from shoal.compat.optimizer import BF16_Optimizer, DeepSpeedOptimizer, DeepSpeedZeroOptimizer
from shoal.errors import NotBuiltError, UsageError
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, adamw, batch, config, make, run_steps, sgd, start, start_with

pytestmark = pytest.mark.usefixtures("deepspeed_classes")


def alone(stage: int, **sections: Any) -> DeepSpeedEngine:
    return start(Plain, config(stage, **sections), adamw)


def test_every_getter_of_the_table_answers() -> None:
    engine = alone(2)
    values = {name: getattr(engine, name)() for name in {**PATHS, **DERIVED}}
    assert len(values) > 100
    assert values["zero_optimization"] is True
    assert values["zero_optimization_partition_gradients"] is True
    assert values["zero_optimization_partition_weights"] is False
    assert values["fp16_enabled"] is False
    assert values["zero_gather_16bit_weights_on_model_save"] is False
    assert values["zero_offload_optimizer"] is None
    assert values["zero_cpu_offload"] is False
    assert values["get_data_types"] == (torch.float32, torch.float32)
    assert values["scheduler_name"] is None
    engine.destroy()


def test_getters_say_what_the_file_says() -> None:
    engine = alone(
        3,
        bf16={"enabled": True},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        zero_optimization={
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {"device": "cpu"},
            "stage3_max_live_parameters": 5e8,
        },
    )
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    assert engine.bfloat16_enabled() is True
    assert engine.zero_cpu_offload() is True
    assert engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_max_live_parameters() == 500_000_000
    assert engine.scheduler_name() == "WarmupLR"
    assert engine.scheduler_params()["warmup_num_steps"] == 5
    assert engine.optimizer_name() == "AdamW"
    assert engine.get_batch_info() == (2, 2, 1)
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.get_type() == [0.0]
    assert engine.config["bf16"] == {"enabled": True}
    engine.destroy()


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_a_name_of_deepspeeds_engine_that_is_not_here_is_an_error_by_name(name: str) -> None:
    model = make(Plain)
    model.__dict__[name] = "the model's own"
    engine = start_with(model, config(0), adamw)
    assert not hasattr(engine, name)
    with pytest.raises(NotBuiltError, match=rf"engine\.{name} is not here"):
        getattr(engine, name)
    engine.destroy()


def test_other_names_are_the_models() -> None:
    model = make(Plain)
    model.__dict__["generate"] = lambda: "tokens"
    engine = start_with(model, config(0), adamw)
    assert engine.generate() == "tokens"
    assert engine.mpu is None
    assert engine.mp_world_size == 1
    assert engine.num_experts == []
    assert engine.dp_world_size == engine.seq_dp_world_size == 1
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = engine.nothing
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_consolidated_weights_are_on_rank_0_alone(stage: int) -> None:
    def gather() -> None:
        engine = start(Plain, config(stage), adamw)
        found = engine._zero3_consolidated_16bit_state_dict()
        other = engine._consolidated_16bit_state_dict()
        expected = make(Plain).state_dict()
        if current_world().rank == 0:
            assert found is not None
            assert other is not None
            assert sorted(found) == sorted(other) == sorted(expected)
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        else:
            assert found is None
            assert other is None
        engine.destroy()

    run_ranks(2, gather)


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_without_an_optimizer_evaluates_and_refuses_to_train(stage: int) -> None:
    model = make(Plain)
    inputs, targets = batch(0, 0, 1)
    expected = copy.deepcopy(model)(inputs, targets)

    def evaluate() -> None:
        engine, optimizer, loader, schedule = shoal.initialize(
            model=copy.deepcopy(model),
            config=config(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}),
        )
        assert (optimizer, loader, schedule) == (None, None, None)
        engine.eval()
        with torch.no_grad():
            torch.testing.assert_close(engine(inputs, targets), expected)
        with pytest.raises(UsageError, match="needs an optimizer"):
            engine.backward(engine(inputs, targets))
        assert not hasattr(engine, "param_groups")
        engine.follows_deepspeed = True
        assert (engine.optimizer is engine.parameter_offload) == (stage == 3)
        engine.destroy()

    run_ranks(2, evaluate)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_initialized_again_after_its_engine_was_destroyed(stage: int) -> None:
    model = make(Plain)

    def twice() -> None:
        rank = current_world().rank
        mine = copy.deepcopy(model)
        first = start_with(mine, config(stage), sgd)
        first.backward(first(*batch(0, rank, 2)))
        first.step()
        first.destroy()
        second = start_with(mine, config(stage), sgd)
        second.backward(second(*batch(1, rank, 2)))
        second.step()
        once = start_with(copy.deepcopy(model), config(stage), sgd)
        once.backward(once(*batch(0, rank, 2)))
        once.step()
        before = once.module_state_dict()
        second.destroy()
        once.destroy()
        third = start_with(copy.deepcopy(model), config(stage), sgd)
        third.load_module_state_dict({"module": before})
        third.backward(third(*batch(1, rank, 2)))
        third.step()
        for name, value in third.module_state_dict(prefix="x.").items():
            torch.testing.assert_close(mine.state_dict()[name.removeprefix("x.")], value)
        third.destroy()

    run_ranks(2, twice)


def remove_hooks(engine: DeepSpeedEngine) -> None:
    """As TRL does it around ``generate``."""
    offload = engine.optimizer.parameter_offload
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def add_hooks(engine: DeepSpeedEngine) -> None:
    offload = engine.optimizer.parameter_offload
    if not offload.param_coordinator.is_invalid_trace():
        offload.param_coordinator._invalidate_trace()
    offload._register_deepspeed_module(offload.module)


def test_hooks_that_a_client_removes_and_adds_again_do_not_act_between() -> None:
    def train() -> None:
        rank = current_world().rank
        engine = start(Plain, config(3), adamw)
        plain = start(Plain, config(3), adamw)
        recorder = engine.world.recorder
        for index in range(2):
            with shoal.zero.GatheredParameters(list(engine.module.parameters())):
                with recorder.recording() as entries:
                    remove_hooks(engine)
                    with torch.no_grad():
                        for _ in range(3):
                            engine.module(*batch(7, rank, 2))
                    add_hooks(engine)
                assert list(entries) == []
            for each in (engine, plain):
                each.backward(each(*batch(index, rank, 2)))
                each.step()
        theirs = plain.module_state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in engine.module_state_dict().items())
        engine.destroy()
        plain.destroy()

    run_ranks(2, train)


def test_an_order_that_a_client_has_forgotten_is_recorded_anew() -> None:
    def train() -> None:
        engine = start(Plain, config(3), adamw)
        trace = engine.optimizer.parameter_offload.param_coordinator
        known = [trace.is_invalid_trace()]
        run_steps(engine, 2)
        known.append(trace.is_invalid_trace())
        trace._invalidate_trace()
        known.append(trace.is_invalid_trace())
        run_steps(engine, 1, first=2)
        known.append(trace.is_invalid_trace())
        engine.destroy()
        assert known == [True, False, True, False]

    run_ranks(2, train)


def test_only_stage_3_has_hooks_to_remove() -> None:
    for stage in STAGES:
        engine = alone(stage)
        assert hasattr(engine.optimizer, "parameter_offload") == (stage == 3)
        engine.destroy()


class Wrapper:
    """As Lightning wraps an optimizer: a class made of itself and the optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", (Wrapper, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_class_made_of_the_optimizers_sees_what_the_optimizer_sees() -> None:
    engine = alone(2, fp16={"enabled": True, "initial_scale_power": 4})
    wrapper: Any = Wrapper(engine.optimizer)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert isinstance(wrapper, DeepSpeedOptimizer)
    assert wrapper.param_groups is engine.optimizer.param_groups
    assert wrapper.defaults["lr"] == 1e-2
    assert wrapper.overflow is False
    engine.optimizer.overflow = True
    assert wrapper.overflow is True
    assert wrapper.loss_scale == wrapper.cur_scale == wrapper.loss_scaler.cur_scale == 16.0
    assert wrapper.dynamic_loss_scale is True
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_the_ranks_main_parameters_together_are_all_of_them(stage: int) -> None:
    total = sum(p.numel() for p in make(Plain).parameters())

    def count() -> int:
        engine = start(Plain, config(stage, bf16={"enabled": True}), adamw)
        pieces = engine.optimizer.single_partition_of_fp32_groups
        assert all(piece.dtype == torch.float32 and piece.dim() == 1 for piece in pieces)
        assert len(engine.optimizer.fp32_partitioned_groups_flat) == len(pieces)
        found = sum(piece.numel() for piece in pieces)
        engine.destroy()
        return found

    held = run_ranks(2, count)
    assert sum(held) >= total if stage else all(each >= total for each in held)


def test_state_dicts_that_are_loaded_leave_the_groups_the_dicts_that_they_were() -> None:
    engine = alone(2)
    groups = list(engine.optimizer.param_groups)
    engine.backward(engine(*batch(0, 0, 1)))
    engine.step()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    engine.optimizer.load_state_dict(saved)
    assert all(a is b for a, b in zip(groups, engine.optimizer.param_groups, strict=True))
    assert engine.get_lr() == [0.25]
    assert engine.param_groups is engine.optimizer.param_groups
    assert set(engine.state[engine.module.head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    engine.destroy()


def test_compiling_is_in_place() -> None:
    engine = alone(1)
    assert engine.is_compiled is False
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled is True
    with pytest.raises(NotBuiltError, match="DeepCompile"):
        engine.compile(schedule=[(0, [])])
    engine.destroy()


def test_the_engine_is_a_module_whose_state_names_begin_with_module() -> None:
    engine = alone(0)
    assert isinstance(engine, nn.Module)
    assert all(name.startswith("module.") for name in engine.state_dict())
    engine.destroy()


# What DeepSpeed asserts, where `import deepspeed` is Shoal


def engine_that_asserts(stage: int, **sections: Any) -> DeepSpeedEngine:
    engine = start(Plain, config(stage, **sections), adamw)
    engine.follows_deepspeed = True
    return engine


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_is_refused_where_deepspeed_refuses_it_and_only_there(stage: int) -> None:
    def job() -> None:
        engine = engine_that_asserts(stage)
        if stage > 1:
            with pytest.raises(
                AssertionError, match=f"incompatible with gradient partitioning logic of ZeRO stage {stage}"
            ):
                with engine.no_sync():
                    pass
        else:
            with engine.no_sync():
                engine.backward(engine(*batch(0, 0, 1)))
                with pytest.raises(AssertionError, match=r"illegal to call Engine\.step\(\) inside no_sync"):
                    engine.step()
                with pytest.raises(UsageError, match="reentry is unsupported"):
                    with engine.no_sync():
                        pass
            engine.step()
        engine.destroy()
        own = start(Plain, config(stage), adamw)
        with own.no_sync(), own.no_sync():
            own.backward(own(*batch(0, 0, 1)))
        own.destroy()

    run_ranks(1, job)


def test_backward_gives_back_the_loss_of_its_share_where_the_name_is_lent() -> None:
    for is_lent, share in ((True, 4), (False, 1)):
        engine = alone(1, gradient_accumulation_steps=4)
        engine.follows_deepspeed = is_lent
        loss = engine(*batch(0, 0, 1))
        assert engine.backward(loss).item() == loss.item() / share
        loss = engine(*batch(1, 0, 1))
        assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
        engine.destroy()


def test_scale_takes_one_number_with_a_graph() -> None:
    engine = alone(1)
    for kind in (AssertionError, UsageError):
        for wrong in (torch.ones(2, requires_grad=True), torch.ones(()), 1.0):
            with pytest.raises(kind, match="scalar tensor with a graph behind it"):
                engine.scale(wrong)  # type: ignore[arg-type]
    engine.destroy()


@pytest.mark.parametrize(("sections", "wanted"), [({}, False), ({"fp16": {"enabled": True}}, True)])
def test_the_optimizer_says_whether_losses_are_scaled(sections: dict[str, Any], wanted: bool) -> None:
    engine = alone(1, **sections)
    assert engine.optimizer.needs_scaler() is wanted
    engine.destroy()


def test_parameters_without_a_value_have_none_or_nothing() -> None:
    from shoal.compat.deepspeed.utils import tensor_fragment as parts

    def job(stage: int) -> None:
        model = make(Plain)
        frozen = model.blocks[0].up.weight  # type: ignore[union-attr,index]
        frozen.requires_grad = False  # type: ignore[union-attr]
        engine = start_with(model, config(stage), adamw)
        run_steps(engine, 1)
        assert parts.safe_get_full_fp32_param(frozen) is None  # type: ignore[arg-type]
        assert parts.safe_get_full_grad(frozen) is None  # type: ignore[arg-type]
        assert parts.safe_get_local_grad(frozen) is None  # type: ignore[arg-type]
        assert parts.safe_get_local_fp32_param(frozen) is None  # type: ignore[arg-type]
        assert parts.safe_get_full_optimizer_state(frozen, "exp_avg") is None  # type: ignore[arg-type]
        assert parts.safe_get_local_optimizer_state(frozen, "exp_avg") is None  # type: ignore[arg-type]
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(parts.safe_get_local_grad(p) is None for p in trained)
        engine.backward(engine(*batch(1, current_world().rank, 3)))
        used = [p for p in trained if parts.safe_get_full_grad(p) is not None]
        assert len(used) > 4
        for get in (parts.safe_get_local_grad, parts.safe_get_local_fp32_param):
            assert all(get(p) is not None for p in used)
        stepped = [p for p in used if parts.safe_get_full_optimizer_state(p, "exp_avg") is not None]
        assert len(stepped) > 4
        assert all(parts.safe_get_local_optimizer_state(p, "exp_avg") is not None for p in stepped)
        engine.destroy()

    for stage in (1, 2, 3):
        run_ranks(3, job, stage)


def test_a_model_that_is_unwrapped_for_generation_is_whole_and_quiet() -> None:
    from shoal.compat.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    def job() -> None:
        rank = current_world().rank
        engine = start(Plain, config(3), adamw)
        run_steps(engine, 1)
        with unwrap_model_for_generation(engine) as whole:
            with engine.world.recorder.recording() as entries, torch.no_grad():
                inside = whole(*batch(7, rank, 2)).clone()
            assert list(entries) == []
            assert engine.parameter_offload.param_coordinator.is_invalid_trace()
        with torch.no_grad():
            torch.testing.assert_close(engine(*batch(7, rank, 2)), inside, atol=0, rtol=0)
        run_steps(engine, 1, first=1)
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_shows_each_ranks_parts_of_the_gradients(stage: int) -> None:
    def job() -> tuple[Any, ...]:
        engine = start(Plain, config(stage), adamw)
        assert engine.optimizer.averaged_gradients == {0: []}
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        parts = engine.optimizer.averaged_gradients
        whole = [engine.access.full_gradient(p) for p in engine.optimizer.param_groups[0]["params"]]
        found = [part.clone() for part in parts[0]], [grad.clone() for grad in whole if grad is not None]
        engine.destroy()
        return found

    (first, whole), (second, _) = run_ranks(2, job)
    assert len(first) == len(second) == len(whole) > 4
    for one, other, all_of_it in zip(first, second, whole, strict=True):
        assert torch.equal(one if stage == 0 else torch.cat([one, other]), all_of_it.reshape(-1))


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_found_by_the_parts_of_main_parameters_too(stage: int) -> None:
    def job() -> None:
        engine = start(Plain, config(stage), adamw)
        run_steps(engine, 1)
        pieces, state = engine.optimizer.single_partition_of_fp32_groups, engine.optimizer.state
        stepped = [piece for piece in pieces if state[piece]]  # type: ignore[index]
        assert stepped
        for piece in stepped:
            assert piece in state
            assert state[piece]["exp_avg"].shape == piece.shape  # type: ignore[index]
            assert all(parameter is not piece for parameter in state)
        with pytest.raises(KeyError):
            _ = state[torch.zeros(3)]  # type: ignore[index]
        assert torch.zeros(3) not in state
        engine.destroy()

    run_ranks(2, job)


@pytest.mark.parametrize(
    ("sections", "types"),
    [
        ({}, (torch.float32, torch.float32, torch.float32)),
        ({"bf16": {"enabled": True}}, (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        ({"fp16": {"enabled": True}}, (torch.float16, torch.float16, torch.float16)),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp16"},
            (torch.bfloat16, torch.float32, torch.float16),
        ),
    ],
)
def test_formats_that_the_config_leaves_open_are_the_models(sections: dict[str, Any], types: tuple[Any, ...]) -> None:
    engine = alone(1, **sections)
    assert (*engine.get_data_types(), engine.communication_data_type) == types
    is_wrapper = types[0] == torch.bfloat16 and types[1] == torch.float32
    assert isinstance(engine.optimizer, BF16_Optimizer) == is_wrapper
    assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer) != is_wrapper
    engine.destroy()


def test_the_optimizer_says_how_gradients_are_clipped() -> None:
    for given, expected in (({}, 1.0), ({"gradient_clipping": 0.5}, 0.5), ({"gradient_clipping": 0}, 0.0)):
        settings = {**config(1), **given}
        if not given:
            del settings["gradient_clipping"]
        engine = start_with(make(Plain), settings, adamw)
        assert engine.optimizer.clip_grad == engine.gradient_clipping() == expected
        engine.destroy()


@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps])
def test_an_engine_that_is_copied_or_pickled_says_what_to_do(use: Callable[[Any], Any]) -> None:
    engine = alone(1)
    with pytest.raises(UsageError, match="an engine cannot be copied or pickled"):
        use(engine)
