"""``deepspeed.initialize`` says what is wrong in the kinds of error that DeepSpeed's scripts catch."""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shoal.compat.deepspeed.ops.lamb import FusedLamb
from shoal.compat.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from shoal.compat.deepspeed.runtime.entry import initialize
from shoal.compat.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from shoal.compat.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from shoal.compat.deepspeed.utils.timer import ThroughputTimer
from shoal.errors import ConfigError, ModelError, OptimizerError, UsageError
from shoal.running.optimizer import ShardedOptimizer

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
TWICE = {"train_batch_size": 3, "gradient_accumulation_steps": 2}  # 3 is not 1 x 2 x 1
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def on_one_rank(job: Any) -> None:
    run_ranks(1, job)


@pytest.mark.parametrize(
    ("given", "kind", "code"),
    [
        ({"model": None, "config": CONFIG}, ModelError, "model-type"),
        ({"model": nn.Linear(2, 2)}, ConfigError, "config-missing"),
        (
            {
                "model": nn.Linear(2, 2),
                "config": {**CONFIG, **TWICE, **ADAM},
            },
            ConfigError,
            "config",
        ),
    ],
)
def test_what_deepspeed_asserts_is_an_assertion_error_too(given: dict[str, Any], kind: type, code: str) -> None:
    def job() -> None:
        with pytest.raises(AssertionError) as caught:
            initialize(**given, dist_init_required=False)
        assert isinstance(caught.value, kind)
        assert vars(caught.value).get("code", kind.code) == code  # type: ignore[attr-defined]

    on_one_rank(job)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_schedule_of_the_optimizer_that_accelerate_replaced_is_stepped_without_a_warning(is_replaced: bool) -> None:
    # torch warns in the name of its caller's module.
    step = FunctionType((lambda schedule: schedule.step()).__code__, {"__name__": "accelerate.scheduler"})

    def job() -> None:
        model = nn.Linear(2, 2)
        first = torch.optim.AdamW(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda index: 1 / (index + 1))
        optimizer = DeepSpeedCPUAdam(first.param_groups, lr=1.0) if is_replaced else first
        config = {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        engine, made, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        if is_replaced:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        step(schedule)
        assert made.param_groups[0]["lr"] == 0.5
        engine.destroy()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on_one_rank(job)
    order = [each for each in found if "Detected call of `lr_scheduler.step()`" in str(each.message)]
    assert len(order) == (0 if is_replaced else 1)


def test_backward_and_step_without_an_optimizer_are_assertion_errors_and_usage_errors() -> None:
    def job() -> None:
        engine = initialize(model=nn.Linear(2, 2), config=CONFIG, dist_init_required=False)[0]
        for kind in (AssertionError, UsageError):
            with pytest.raises(kind, match="no-optimizer"):
                engine.backward(engine(torch.ones(1, 2)).sum())
            with pytest.raises(kind, match="no-optimizer"):
                engine.step()
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize("is_in_config", [True, False])
def test_a_schedule_of_another_optimizer_is_refused(is_in_config: bool) -> None:
    model = nn.Linear(2, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(other)

    def job() -> None:
        mine = None if is_in_config else torch.optim.AdamW(model.parameters(), lr=0.1)
        config = {**CONFIG, **ADAM} if is_in_config else CONFIG
        with pytest.raises(OptimizerError, match=r"schedule-of-another.*ConstantLR of another optimizer \(SGD\)"):
            shoal.initialize(model=model, optimizer=mine, lr_scheduler=schedule, config=config)

    on_one_rank(job)


def test_the_oldest_spelling_of_the_config_argument_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **ADAM}))

    def job() -> None:
        args = argparse.Namespace(deepscale_config=str(path), local_rank=0)
        engine = initialize(args=args, model=nn.Linear(2, 2), dist_init_required=False)[0]
        assert engine.train_micro_batch_size_per_gpu() == 1
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizer_stands_for_the_one_that_was_handed_in(stage: int) -> None:
    def job() -> None:
        model = nn.Linear(2, 2)
        given = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine, optimizer, _, _ = initialize(
            model=model, optimizer=given, config={**CONFIG, "zero_optimization": {"stage": stage}}
        )
        assert optimizer == given and given == optimizer and hash(optimizer) == hash(given)
        assert optimizer != torch.optim.AdamW(nn.Linear(2, 2).parameters())
        assert isinstance(optimizer, ShardedOptimizer)
        assert isinstance(optimizer, torch.optim.AdamW) == (stage == 0)  # at stage 0 in fp32 DeepSpeed wraps nothing
        assert not isinstance(optimizer, FusedAdam | torch.optim.SGD)
        before = model.weight.detach().clone()
        derived = type("Derived", (optimizer.__class__,), {})  # as Lightning's Fabric does
        optimizer.__class__ = derived
        engine.backward(engine(torch.ones(1, 2)).sum())
        optimizer.step()
        assert engine.global_steps == 1
        assert not torch.equal(model.weight, before)
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize(
    ("name", "params", "zero", "expected"),
    [
        ("Adam", {}, {"stage": 0}, FusedAdam),
        ("Adam", {"adam_w_mode": False}, {"stage": 2}, FusedAdam),
        ("AdamW", {}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, DeepSpeedCPUAdam),
        ("Lion", {}, {"stage": 1}, FusedLion),
        ("Lion", {}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}, DeepSpeedCPULion),
        ("Lamb", {}, {"stage": 0}, FusedLamb),
        ("Adagrad", {}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, DeepSpeedCPUAdagrad),
        ("Adam", {"torch_adam": True}, {"stage": 2}, None),
        ("SGD", {"lr": 0.1}, {"stage": 2}, None),
    ],
)
def test_an_optimizer_of_the_config_counts_as_deepspeeds_class(
    name: str, params: dict[str, Any], zero: dict[str, Any], expected: type | None
) -> None:
    classes = (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, FusedLamb, DeepSpeedCPUAdagrad)

    def job() -> None:
        section = {"type": name, "params": params}
        engine, optimizer, _, _ = initialize(
            model=nn.Linear(2, 2), config={**CONFIG, "optimizer": section, "zero_optimization": zero}
        )
        for each in (optimizer, optimizer.optimizer):
            assert [cls for cls in classes if isinstance(each, cls)] == ([expected] if expected else [])
        if expected in (FusedAdam, DeepSpeedCPUAdam):
            assert optimizer.optimizer.adam_w_mode is params.get("adam_w_mode", True)
        engine.destroy()

    on_one_rank(job)


def test_the_wrapped_optimizer_gives_its_state_by_parameter() -> None:
    def job() -> None:
        torch.manual_seed(0)
        made = initialize(
            model=nn.Linear(2, 2), config={**CONFIG, **ADAM, "zero_optimization": {"stage": 2}}, model_parameters=None
        )
        engine, optimizer = made[0], made[1]
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        saved = optimizer.optimizer.state_dict()
        assert sorted(saved["state"]) == [0, 1]
        assert saved["state"][0]["exp_avg"].shape == (2, 2)
        moment = saved["state"][0]["exp_avg"].clone()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        optimizer.optimizer.load_state_dict(
            {**saved, "state": {0: {"exp_avg": moment, "exp_avg_sq": moment, "step": torch.tensor(1.0)}, 1: {}}}
        )
        torch.testing.assert_close(optimizer.optimizer.state_dict()["state"][0]["exp_avg"], moment)
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_odd_size_of_buckets_is_refused_as_deepspeed_refuses_it(stage: int) -> None:
    model = nn.Linear(2, 2)

    def job() -> None:
        for size in (1001, 1000):
            zero = {"zero_optimization": {"stage": stage, "allgather_bucket_size": size}}
            given = {"model": model, "config": {**CONFIG, **ADAM, **zero}, "dist_init_required": False}
            if size == 1001:
                for kind in (AssertionError, ConfigError):
                    with pytest.raises(kind, match=r"multiple of nccl_start_alignment_factor, which is 2, got 1001"):
                        initialize(**given)
            else:
                initialize(**given)[0].destroy()  # the model is free again

    on_one_rank(job)


def test_an_optimizer_on_the_host_is_deepspeeds_only_where_the_config_asks_for_it() -> None:
    from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
    from shoal.compat.deepspeed.runtime.zero.utils import ZeRORuntimeException

    model = nn.Linear(2, 2)

    def start(force: bool | None, kind: Any) -> None:
        config = {**CONFIG, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
        if force is not None:
            config["zero_force_ds_cpu_optimizer"] = force
        optimizer = kind(model.parameters(), lr=0.1)
        initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0].destroy()

    def job() -> None:
        with pytest.raises(ZeRORuntimeException, match="must be DeepSpeedCPUAdam, as the config asks; got Adam"):
            start(True, torch.optim.Adam)
        start(True, DeepSpeedCPUAdam)
        start(False, torch.optim.Adam)
        start(None, torch.optim.Adam)

    on_one_rank(job)


def test_modules_that_the_config_makes_one_unit_bear_the_mark() -> None:
    from shoal.compat.deepspeed.utils.z3_leaf_module import get_z3_leaf_modules

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())

    def job(leaf: dict[str, Any], stage: int) -> list[int]:
        config = {**CONFIG, **ADAM, "zero_optimization": {"stage": stage, "leaf_module": leaf}}
        mine = copy.deepcopy(model)
        engine = initialize(model=mine, config=config, dist_init_required=False)[0]
        found = [list(mine).index(module) for module in get_z3_leaf_modules(mine)]
        engine.destroy()
        return found

    assert run_ranks(1, job, {"names": ["1"]}, 3) == [[1]]
    assert run_ranks(1, job, {"classes": ["ReLU"]}, 3) == [[2]]
    assert run_ranks(1, job, {"name_suffixes": ["2"]}, 3) == [[2]]
    assert run_ranks(1, job, {}, 3) == [[]]


def test_at_stage_0_the_optimizer_has_deepspeeds_names_for_bf16() -> None:
    def job() -> None:
        engine, optimizer, _, _ = initialize(
            model=nn.Linear(2, 2), config={**CONFIG, **ADAM, "bf16": {"enabled": True}}
        )
        assert isinstance(optimizer, FP16_UnfusedOptimizer) and not isinstance(optimizer, FP16_Optimizer)
        assert optimizer.low_precision_dtype is torch.bfloat16
        scale = optimizer.loss_scale_config
        assert (scale.cur_scale, scale.dynamic_loss_scale, scale.cur_iter) == (1.0, False, 0)
        assert scale.scale_window is None and scale.min_loss_scale is None
        assert [sum(p.numel() for p in group) for group in optimizer.fp32_groups] == [6]
        assert sum(p.numel() for p in optimizer.fp32_groups_flat) == 6
        assert all(p.dtype is torch.float32 for p in optimizer.fp32_groups_flat)
        engine.destroy()

    on_one_rank(job)


def test_the_loss_scale_of_fp16_can_be_read() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "min_loss_scale": 2, "hysteresis": 1}

    def job() -> None:
        engine, optimizer, _, _ = initialize(model=nn.Linear(2, 2), config={**CONFIG, **ADAM, "fp16": fp16})
        scale = optimizer.loss_scale_config
        assert optimizer.low_precision_dtype is torch.float16
        assert (scale.cur_scale, scale.dynamic_loss_scale, scale.scale_window, scale.min_loss_scale) == (16, True, 3, 2)
        engine.backward(engine(torch.full((1, 2), 1e4, dtype=torch.float16)).sum())
        engine.step()
        assert (scale.cur_scale, scale.cur_iter) == (8, 1)
        engine.destroy()

    on_one_rank(job)


def test_a_launched_process_that_must_not_initialise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="dist_init_required=False"):
        initialize(model=nn.Linear(2, 2), config=CONFIG, dist_init_required=False)


def test_the_throughput_timer_counts_steps_and_times_those_after_the_second() -> None:
    def job() -> None:
        model, settings = nn.Linear(2, 2), {**CONFIG, **ADAM, "gradient_accumulation_steps": 2}
        engine = initialize(model=model, config=settings)[0]
        timer = engine.tput_timer
        assert timer.batch_size == 2 and not timer.initialized and timer.global_step_count == 0
        for _ in range(10):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
        assert timer.global_step_count == 4 and timer.total_elapsed_time > 0  # the first step began before it did
        assert timer.avg_samples_per_sec() == pytest.approx(2 * 2 / timer.total_elapsed_time)
        engine.destroy()

    on_one_rank(job)


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_throughput_timer_that_would_never_speak_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="steps_per_output must be"):
        ThroughputTimer(argparse.Namespace(enabled=True, synchronized=False), 1, steps_per_output=value)  # type: ignore[arg-type]


def test_a_throughput_timer_says_the_speed_at_multiples() -> None:
    said: list[str] = []
    switches = argparse.Namespace(enabled=True, synchronized=True)
    timer = ThroughputTimer(switches, 8, start_step=0, steps_per_output=2, logging_fn=said.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for index in range(4):
        timer.start()
        timer.stop(global_step=index % 2 == 1)
    assert timer.micro_step_count == 4 and timer.global_step_count == 2 and timer.step_elapsed_time == 0
    (line,) = said
    assert line.startswith("step 2: ") and line.endswith(" samples per second")
    timer.update_epoch_count()
    assert timer.epoch_count == 1 and timer.micro_step_count == 0


@pytest.mark.parametrize(("given", "stage", "is_refused"), [("fp32", 0, True), ("bf16", 0, False), ("fp32", 1, False)])
def test_gradients_of_another_format_at_stage_0_are_refused_as_deepspeed_refuses_them(
    given: str, stage: int, is_refused: bool
) -> None:
    formats = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": given}}
    settings = {**CONFIG, **ADAM, **formats, "zero_optimization": {"stage": stage}}

    def job() -> None:
        model = nn.Linear(2, 2)
        if is_refused:
            for kind in (NotImplementedError, ConfigError):
                with pytest.raises(kind, match="gradients in fp32 of a model in bf16 at stage 0"):
                    initialize(model=model, config=settings)
        else:
            initialize(model=model, config=settings)[0].destroy()

    on_one_rank(job)


class Grid:
    """What a script hands over as ``mpu``: Megatron's parallel_state, or a grid of DeepSpeed's."""

    def __init__(self, **sizes: int) -> None:
        for axis, size in {"model_parallel": 1, "data_parallel": 2, **sizes}.items():
            setattr(self, f"get_{axis}_world_size", lambda size=size: size)


def test_an_mpu_of_data_parallel_ranks_is_taken() -> None:
    model = nn.Linear(2, 2)

    def rank() -> int:
        engine, *_ = initialize(model=copy.deepcopy(model), config={**CONFIG, **ADAM}, mpu=Grid())
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        size = engine.dp_world_size
        engine.destroy()
        return size

    assert run_ranks(2, rank) == [2, 2]


@pytest.mark.parametrize(
    ("sizes", "kind", "text"),
    [
        ({"model_parallel": 2}, ConfigError, "the mpu's tp 2 x data-parallel 2 = 4 ranks, and there are 2"),
        ({"pipe_parallel": 2, "data_parallel": 1}, ModelError, "Linear has no list of blocks"),
        ({"pipeline_model_parallel": 4}, ConfigError, "pp 4 x data-parallel 2 = 8 ranks, and there are 2"),
        ({"context_parallel": 2}, ConfigError, "cp 2 x data-parallel 2 = 4 ranks, and there are 2"),
        ({"data_parallel": 1}, ConfigError, "data-parallel 1 = 1 ranks, and there are 2"),
    ],
)
def test_an_mpu_that_does_not_fit_the_ranks_is_refused_by_name(
    sizes: dict[str, int], kind: type[Exception], text: str
) -> None:
    def rank() -> None:
        with pytest.raises(kind, match=text):
            initialize(model=nn.Linear(2, 2), config={**CONFIG, **ADAM}, mpu=Grid(**sizes))

    run_ranks(2, rank)
