"""Optimizers, leaf modules, estimates and small helpers under DeepSpeed's names: they do what their names say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.compat import finder
from shoal.compat.accelerator import DeepSpeedAccelerator
from shoal.errors import ConfigError, ModelError, OptimizerError, UsageError
from shoal.optim.elementwise import check
from shoal.sharding.partition import UnitRules, partition


@pytest.fixture(autouse=True)
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


def stepped(make: Any) -> torch.Tensor:
    """A parameter after three steps. Shape: [6]."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = make([parameter])
    for step in range(3):
        parameter.grad = torch.linspace(0.5, -1, 6) * (step + 1)
        optimizer.step()
    return parameter.detach()


def test_adam_under_deepspeeds_names_is_torchs_with_decoupled_decay_by_default() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    decoupled = stepped(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    coupled = stepped(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5))
    assert not torch.allclose(decoupled, coupled)
    for cls, mode in ((DeepSpeedCPUAdam, "adamw_mode"), (FusedAdam, "adam_w_mode")):
        torch.testing.assert_close(stepped(lambda p, c=cls: c(p, lr=0.1, weight_decay=0.5)), decoupled)
        torch.testing.assert_close(
            stepped(lambda p, c=cls, m=mode: c(p, lr=0.1, weight_decay=0.5, **{m: False})), coupled
        )
        uncorrected = stepped(lambda p, c=cls: c(p, lr=0.1, bias_correction=False))
        assert not torch.allclose(uncorrected, stepped(lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)))


def test_the_other_optimizers_have_deepspeeds_defaults() -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def defaults(cls: Any) -> dict[str, Any]:
        return dict(cls([torch.nn.Parameter(torch.zeros(2))]).defaults)

    assert defaults(DeepSpeedCPULion)["betas"] == defaults(FusedLion)["betas"] == (0.9, 0.999)
    assert (defaults(DeepSpeedCPUAdagrad)["lr"], defaults(DeepSpeedCPUAdagrad)["eps"]) == (1e-2, 1e-10)
    assert (defaults(FusedLamb)["max_coeff"], defaults(FusedLamb)["min_coeff"]) == (10.0, 0.01)
    with pytest.raises(OptimizerError, match=r"max_grad_norm=1.0(.|\n)*gradient_clipping"):
        FusedLamb([torch.nn.Parameter(torch.zeros(2))], max_grad_norm=1.0)


def test_they_are_known_to_run_on_shards_without_a_trial() -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    for cls in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion, FusedLion):
        assert check(cls(parameters)) == "elementwise"
    assert check(FusedLamb(parameters)) == "whole-tensor"
    assert is_zero_supported_optimizer(DeepSpeedCPUAdam(parameters))
    assert not is_zero_supported_optimizer(torch.optim.LBFGS(parameters))


def test_the_one_bit_optimizers_take_deepspeeds_arguments() -> None:
    from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    same = {"cuda_aware": False, "comm_backend_name": "nccl", "amsgrad": False, "max_grad_norm": 0.0}
    assert check(OnebitAdam(parameters, None, 0.1, freeze_step=3, eps_inside_sqrt=False, **same)) == "elementwise"
    assert check(ZeroOneAdam(parameters, deepspeed=object(), local_step_clipper=4, **same)) == "elementwise"
    assert check(OnebitLamb(parameters, freeze_step=3, eps_inside_sqrt=True, coeff_beta=0.5, **same)) == "whole-tensor"
    for cls in (OnebitAdam, ZeroOneAdam, OnebitLamb):
        with pytest.raises(OptimizerError, match=r"max_grad_norm=1.0(.|\n)*gradient_clipping"):
            cls(parameters, max_grad_norm=1.0)


def test_the_clients_own_group_dicts_are_used() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    groups = [{"params": (p for p in [torch.nn.Parameter(torch.zeros(2))]), "lr": 0.5}]
    optimizer = DeepSpeedCPUAdam(groups, lr=0.1)
    assert optimizer.param_groups[0] is groups[0] and groups[0]["lr"] == 0.5


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Expert() for _ in range(3)])


def test_a_marked_module_is_one_unit() -> None:
    import deepspeed

    model = torch.nn.Sequential(Mixture(), Mixture(), torch.nn.Linear(4, 4))
    rules = UnitRules(classes=("Expert",))
    assert [spec.name for spec in partition(model, rules)][1:] == [f"{m}.parts.{e}" for m in (0, 1) for e in (0, 1, 2)]
    found = deepspeed.utils.set_z3_leaf_modules(model, [Mixture])
    assert found == [model[0], model[1]] == deepspeed.utils.get_z3_leaf_modules(model)
    assert model[0]._z3_leaf is True and deepspeed.utils.z3_leaf_module(model[0])
    units = {spec.name: len(spec.parameters) for spec in partition(model, rules)}
    assert units == {"root": 2, "0": 12, "1": 12}
    deepspeed.utils.unset_z3_leaf_modules(model, ["Mixture"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []


def test_marks_by_name_and_by_suffix_say_what_was_not_found() -> None:
    from deepspeed.utils import set_z3_leaf_modules, set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix

    model = torch.nn.Sequential(Mixture(), Mixture())
    assert set_z3_leaf_modules_by_name(model, ["1", "7"], raise_if_not_found=False) == ([model[1]], ["7"])
    assert set_z3_leaf_modules_by_suffix(model, ["parts"]) == ([model[0].parts, model[1].parts], [])
    with pytest.raises(ModelError, match="no module called '7' in Sequential"):
        set_z3_leaf_modules_by_name(model, ["7"])
    with pytest.raises(ValueError, match="no module of class 'Conv2d'"):
        set_z3_leaf_modules(model, [torch.nn.Conv2d])


def test_estimates_are_the_arithmetic_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.zero.stage3 import (
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from deepspeed.runtime.zero.stage_1_and_2 import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
    )

    # 1,000 parameters, the largest layer 100, on 1 node of 4 devices
    assert estimate_zero2_model_states_mem_needs(1000, 4, 1, cpu_offload=False) == (24000, 6000)
    assert estimate_zero2_model_states_mem_needs(1000, 4, 1, cpu_offload=True) == (24000, 3000)
    assert estimate_zero3_model_states_mem_needs(1000, 100, 4, 1, False, False, True) == (2400, 4900, 400)
    assert estimate_zero3_model_states_mem_needs(1000, 100, 4, 1, True, True, True) == (27000, 400, 400)
    assert estimate_zero3_model_states_mem_needs(1000, 100, 4, 1, True, False, False) == (24000, 900, 400)
    estimate_zero3_model_states_mem_needs_all_live(torch.nn.Linear(30, 30), num_gpus_per_node=2)
    estimate_zero2_model_states_mem_needs_all_cold(1000)
    said = capsys.readouterr().out
    assert "Model states of 930 parameters, the largest layer 930, on 1 node(s) of 2 device(s)" in said
    assert "offload_param=cpu, offload_optimizer=cpu, zero_init=1" in said and said.count("offload_optimizer") == 8


def test_a_builder_says_whether_the_operator_is_there_and_loads_it_if_it_is() -> None:
    import deepspeed
    from deepspeed.ops.aio import AsyncIOBuilder
    from deepspeed.ops.op_builder import CPUAdamBuilder, TransformerBuilder

    assert deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME] is True
    assert deepspeed.ops.__compatible_ops__[TransformerBuilder.NAME] is False
    assert deepspeed.get_accelerator().get_op_builder("CPUAdamBuilder") is CPUAdamBuilder
    assert AsyncIOBuilder().is_compatible()
    assert AsyncIOBuilder().load(verbose=False).aio_handle().get_block_size() == 1 << 20
    with pytest.raises(NotImplementedError, match="the compiled operator 'transformer'"):
        TransformerBuilder().load()


def test_the_configuration_is_an_object_with_its_keys() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    config = DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    assert (config.train_micro_batch_size_per_gpu, config.zero_config.stage) == (4, 2)
    assert config._param_dict["train_batch_size"] == 4
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'train_batch_size'"):
        DeepSpeedConfig({"train_batch_sise": 4})
    assert DeepSpeedConfigError is ConfigError


def test_the_options_of_scripts_are_added() -> None:

    import deepspeed

    parser = deepspeed.add_config_arguments(deepspeed.add_tuning_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(
        ["--deepspeed", "--deepspeed_config", "x.json", "--lr_schedule", "OneCycle", "--cycle_max_lr", "2"]
    )
    assert (args.deepspeed, args.deepspeed_config, args.lr_schedule, args.cycle_max_lr) == (
        True,
        "x.json",
        "OneCycle",
        2.0,
    )
    assert (args.warmup_num_steps, args.warmup_type) == (1000, "log")


def test_the_optimizer_that_a_wrapper_has_is_returned() -> None:
    from deepspeed.runtime.lr_schedules import get_torch_optimizer

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert get_torch_optimizer(SimpleNamespace(optimizer=optimizer)) is optimizer
    with pytest.raises(TypeError, match="got int"):
        get_torch_optimizer(3)


def test_tensors_are_moved_and_cloned_inside_structures() -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.utils import move_to_device

    row = torch.arange(12.0).view(3, 4)[1]
    cloned = clone_tensors_for_torch_save({"a": [row, 5], "b": (row[:2],)})
    assert cloned["a"][1] == 5 and torch.equal(cloned["b"][0], torch.tensor([4.0, 5.0]))
    assert [t.untyped_storage().nbytes() for t in (cloned["a"][0], cloned["b"][0])] == [16, 8]
    moved = move_to_device({"a": [row], "b": "text"}, "meta")
    assert moved["a"][0].is_meta and moved["b"] == "text"


def test_loops_parts_and_versions() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform
    from deepspeed.utils import RepeatingLoader
    from deepspeed.utils.torch import required_torch_version

    loader = iter(RepeatingLoader([1, 2]))
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_balanced([5, 1, 1, 1, 1, 1, 5], 3) == [0, 1, 6, 7]
    assert required_torch_version(min_version=2.1) and not required_torch_version(max_version="2.0")


def test_a_model_on_the_meta_device_has_no_memory() -> None:
    import deepspeed

    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = torch.nn.Linear(3, 3)
    assert made.weight.is_meta and made.weight.dtype == torch.bfloat16
    assert torch.nn.Linear(3, 3).weight.dtype == torch.float32
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert not torch.nn.Linear(3, 3).weight.is_meta


def test_a_monitor_of_a_configuration_writes_files(tmp_path: Path) -> None:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    monitor = MonitorMaster(get_monitor_config(section))
    monitor.write_events([("Train/loss", 2.5, 10)])
    monitor.close()
    assert monitor.enabled and any("2.5" in path.read_text() for path in tmp_path.rglob("*.csv"))


def test_groups_are_those_of_data_parallelism() -> None:
    from deepspeed.utils import groups

    assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (1, 0)
    assert (groups._get_sequence_parallel_world_size(), groups.get_model_parallel_rank()) == (1, 0)
    assert (groups._get_expert_parallel_world_size("ep_size_1"), groups._get_expert_parallel_rank("ep_size_1")) == (
        1,
        0,
    )
    with pytest.raises(AssertionError, match="expert parallel group is not initialized: 'ep_size_2'"):
        groups._get_expert_parallel_group("ep_size_2")
    with pytest.raises(UsageError, match="pass ep_size to"):
        groups.initialize(ep_size=2)


def test_an_engine_is_made_and_known_by_its_stage_and_clipping_is_its_own() -> None:
    import deepspeed
    from deepspeed.runtime.utils import clip_grad_norm_
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.runtime.zero.utils import is_zero_param

    for stage in (0, 2, 3):
        model = torch.nn.Linear(4, 4)
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
        assert isinstance(optimizer, DeepSpeedZeroOptimizer) == (stage == 2)
        assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
        assert deepspeed.comm.is_initialized() and deepspeed.comm.get_world_size() == 1
        assert not is_zero_param(torch.zeros(1))
        with pytest.raises(UsageError, match=r"\[clip-engine\]"):
            clip_grad_norm_(model.parameters(), 1.0)
        engine.destroy()
    with deepspeed.zero.unwrap_model_for_generation(model) as inner:
        assert inner is model
    deepspeed.comm.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_clipping_says_that_it_sees_no_gradients_of_an_engine(stage: int) -> None:
    import deepspeed
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    def job() -> None:
        model = torch.nn.Linear(4, 4)
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        engine.backward(engine(torch.ones(1, 4)).sum())
        for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            assert clip(model.parameters(), 1.0) == 0
        clip_grad_value_(model.parameters(), 1.0)
        engine.step()
        assert engine.get_global_grad_norm() > 1
        engine.destroy()

    with pytest.warns(UserWarning, match="has no effect on parameters of an engine(.|\n)*gradient_clipping") as found:
        run_ranks(2, job)
    assert [warning.filename for warning in found] == [__file__] * 6


def test_the_cpu_has_as_many_devices_as_local_size_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    accelerator = deepspeed.get_accelerator()
    monkeypatch.setenv("LOCAL_SIZE", "5")
    assert accelerator.device_name() == "cpu" and accelerator.device_count() == 5
    assert accelerator.device_name(1) == "cpu" and accelerator.current_device_name() == "cpu"
    assert accelerator.communication_backend_name() == "gloo" and accelerator.is_available()
    assert accelerator.memory_allocated() > 0 and accelerator.total_memory() > accelerator.available_memory() > 0
    assert accelerator.FloatTensor([1.0, 2.0]).dtype == torch.float32 and accelerator.Stream is None


def test_the_first_gpu_has_its_own_memory_where_another_one_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(total_memory=100 + index))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    accelerator = DeepSpeedAccelerator("cuda")
    assert [accelerator.total_memory(index) for index in (0, 1, None)] == [100, 101, 103]


def test_the_report_names_versions_clients_and_operators(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed import __version__, env_report

    env_report.main()
    said = capsys.readouterr().out
    assert f"{__version__}, provided by Shoal" in said and "transformers" in said and "cpu_adam" in said
    env_report.main(hide_operator_status=True)
    assert "cpu_adam" not in capsys.readouterr().out


def test_a_log_of_collectives_that_is_off_is_empty_and_says_how_it_is_switched_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import deepspeed

    with caplog.at_level("INFO", logger="shoal"):
        found = deepspeed.comm.log_summary(return_dict=True)
    assert (found["summary"], found["straggler_analysis"], found["metadata"]["world_size"]) == ({}, None, 1)
    assert json.dumps(found).startswith("{")
    assert "set comms_logger.enabled in the config" in caplog.text
    assert deepspeed.comm.log_summary() is None


def test_a_scripts_own_timers_add_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        for name in ("fwd", "fwd_microstep"):  # two timers, although an engine has one phase for both
            timers(name).start()
            timers(name).stop()
    assert list(timers.get_timers()) == ["fwd", "fwd_microstep"]
    total = timers("fwd").elapsed(reset=False)
    assert timers.get_mean(["fwd", "none"]) == {"fwd": pytest.approx(total / 2)}
    with caplog.at_level("INFO", logger="shoal"):
        timers.log(["fwd", "none"])
    assert "time (ms) | fwd: " in caplog.text
    assert timers("fwd").elapsed() == 0.0
