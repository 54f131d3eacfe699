"""How values and names of a configuration are read: written loosely, aliased, in an old form, null."""

from __future__ import annotations

import enum
import math
import pathlib
from typing import Any

import pytest
import torch

from shoal.config import Config, ConfigWarning, load
from tests.helpers.config_reading import problems, quietly


class Device(enum.Enum):
    cpu = "cpu"


def at(config: Config, path: str) -> Any:
    value: Any = config.effective()
    for part in path.split("."):
        value = value[part]
    return value


def nest(path: str, value: object) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("path", "given", "read"),
    [
        ("fp16.enabled", "true", True),
        ("fp16.enabled", "False", False),
        ("fp16.enabled", 1, True),
        ("fp16.loss_scale", 0, 0.0),
        ("fp16.loss_scale_window", 1000.0, 1000),
        ("zero_optimization.reduce_bucket_size", 2e8, 200_000_000),
        ("zero_optimization.reduce_bucket_size", "5e8", 500_000_000),
        ("zero_optimization.stage", 2.0, 2),
        ("zero_optimization.stage", "3", 3),
        ("zero_optimization.overlap_comm", None, None),
        ("zero_optimization.overlap_comm", "true", True),
        ("zero_optimization.offload_param.device", None, "none"),
        ("zero_optimization.offload_param.device", "None", "none"),
        ("zero_optimization.offload_param.nvme_path", None, None),
        ("zero_optimization.leaf_module.classes", ["Block"], ["Block"]),
        ("gradient_clipping", 1, 1.0),
        ("gradient_clipping", "0.5", 0.5),
        ("gradient_clipping", torch.tensor(1.0).item(), 1.0),
        ("steps_per_print", math.inf, math.inf),
        ("steps_per_print", "Infinity", math.inf),
        ("steps_per_print", 10.0, 10.0),
        ("communication_data_type", "float32", "fp32"),
        ("communication_data_type", torch.bfloat16, "bf16"),
        ("torch_autocast.dtype", "torch.float16", "fp16"),
        ("data_types.grad_accum_dtype", "BF16", "bf16"),
        ("log_level", "WARNING", "warning"),
        ("parallel.dp_shard", "auto", "auto"),
        ("parallel.dp_shard", 4.0, 4),
        ("checkpoint.tag_validation", "WARN", "Warn"),
        ("tensorboard.output_path", pathlib.Path("logs"), "logs"),
    ],
)
def test_values_written_loosely_are_read(path: str, given: object, read: object) -> None:
    found = at(load(nest(path, given)), path)
    assert found == read
    assert type(found) is type(read)


def test_an_enum_stands_for_its_value() -> None:
    config = load(nest("zero_optimization.offload_optimizer.device", Device.cpu), check_supported=False)
    assert config.zero_optimization.offload_optimizer.device == "cpu"


@pytest.mark.parametrize("name", ["zero_optimization", "fp16", "optimizer", "scheduler", "checkpoint", "zenflow"])
def test_null_stands_for_an_absent_section(name: str) -> None:
    source = {"zero_optimization": {"zenflow": None}} if name == "zenflow" else {name: None}
    assert load(source).effective() == load({}).effective()


@pytest.mark.parametrize("given", ["adamw", "AdamW", "ADAMW"])
def test_the_optimizers_type_may_be_in_any_case(given: str) -> None:
    config = load({"optimizer": {"type": given, "params": {"lr": 1}}})
    assert config.optimizer is not None
    kind, params = config.optimizer
    assert (kind, params) == ("AdamW", {"lr": 1.0})


def test_a_type_of_torch_is_left_to_torch() -> None:
    config = load({"optimizer": {"type": "NAdam", "params": {"momentum_decay": 1e-3}}})
    assert config.params_of("optimizer") == {"momentum_decay": 1e-3}


OFFLOAD = "zero_optimization.offload_optimizer"


ALIASES = [
    ("prefetch_bucket_size", "stage3_prefetch_bucket_size", 7),
    ("param_persistence_threshold", "stage3_param_persistence_threshold", 7),
    ("model_persistence_threshold", "stage3_model_persistence_threshold", 7),
    ("max_live_parameters", "stage3_max_live_parameters", 7),
    ("max_reuse_distance", "stage3_max_reuse_distance", 7),
    ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", True),
    ("module_granularity_threshold", "stage3_module_granularity_threshold", 7),
    ("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", True),
    ("allgather_sequential", "stage3_allgather_sequential", True),
]


@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_a_zero_key_is_read_with_and_without_stage3(alias: str, name: str, value: object) -> None:
    for spelling in (alias, name):
        config = load({"zero_optimization": {spelling: value}}, check_supported=False)
        assert getattr(config.zero_optimization, name) == value
        assert config.origin(f"zero_optimization.{name}") == "user"


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ({"aio": {"thread_count": 3}}, "aio.intra_op_parallelism", 3),
        ({"elasticity": {"prefer_large_batch": False}}, "elasticity.prefer_larger_batch", False),
        ({"checkpoint": {"async": False}}, "checkpoint.async_save", False),
    ],
)
def test_other_aliases_are_read(given: dict[str, Any], path: str, value: object) -> None:
    assert at(load(given, check_supported=False), path) == value


@pytest.mark.parametrize(
    ("given", "path", "value", "part"),
    [
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True, "bfloat16 is deprecated; write bf16"),
        ({"zero_optimization": True}, "zero_optimization.stage", 1, "is an old form"),
        ({"zero_optimization": {"cpu_offload": True}}, f"{OFFLOAD}.device", "cpu", "cpu_offload"),
        ({"zero_optimization": {"cpu_offload": False}}, f"{OFFLOAD}.device", "none", "cpu_offload"),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": "true"}},
            "zero_optimization.offload_param.device", "cpu", "cpu_offload_param",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "cpu_offload_use_pin_memory": False}},
            "zero_optimization.offload_optimizer.pin_memory", False, "cpu_offload_use_pin_memory",
        ),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save", True, "is deprecated",
        ),
    ],
)  # fmt: skip
def test_an_old_key_is_mapped_with_one_warning(given: dict[str, Any], path: str, value: object, part: str) -> None:
    with pytest.warns(ConfigWarning) as seen:
        config = load(given, check_supported=False)
    assert at(config, path) == value
    assert len(seen) == 1
    assert part in str(seen[0].message)
    assert config.warnings == (str(seen[0].message),)


def test_the_oldest_form_of_zero_takes_its_bucket_along() -> None:
    config = quietly({"zero_optimization": True, "allgather_size": 1e6})
    assert config.zero_optimization.allgather_bucket_size == 1_000_000
    assert config.origin("zero_optimization.stage") == "deprecated alias"


def test_two_names_of_one_key_must_agree() -> None:
    zero = {"max_live_parameters": 5, "stage3_max_live_parameters": 5}
    assert load({"zero_optimization": zero}).zero_optimization.stage3_max_live_parameters == 5
    found = problems({"zero_optimization": {**zero, "max_live_parameters": 6}})
    assert list(found) == ["zero_optimization.stage3_max_live_parameters"]
    assert "given twice" in found["zero_optimization.stage3_max_live_parameters"]
