"""Functions of ``deepspeed.runtime.config`` that read one value, and the words of its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shoal.compat.config import refuse_duplicates
from shoal.compat.deepspeed.runtime import config as readers
from shoal.compat.small_functions import get_current_level, get_log_level_from_string, logger, should_log_le
from shoal.config import examine
from shoal.errors import ConfigError

ADAM = {"type": "Adam", "params": {"lr": 1, "max_grad_norm": 2}}


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("gradient_clipping", {}, 1.0),
        ("gradient_clipping", {"gradient_clipping": 0}, 0),
        ("log_level", {}, None),
        ("log_level", {"log_level": "debug"}, "debug"),
        ("steps_per_print", {}, None),
        ("train_batch_size", {"train_batch_size": 4}, 4),
        ("gradient_accumulation_steps", {}, None),
        ("managed_gradient_accumulation", {}, True),
        ("zero_force_ds_cpu_optimizer", {}, True),
        ("optimizer_name", {"optimizer": ADAM}, "Adam"),
        ("optimizer_params", {"optimizer": ADAM}, ADAM["params"]),
        ("optimizer_params", {"optimizer": {"params": {"lr": 1}}}, None),
        ("optimizer_gradient_clipping", {"optimizer": ADAM}, 2),
        ("scheduler_name", {}, None),
        ("scheduler_params", {"scheduler": {"type": "WarmupLR", "params": {"a": 1}}}, {"a": 1}),
        ("data_types_params", {}, {}),
        ("checkpoint_params", {"checkpoint": {"tag_validation": "Fail"}}, {"tag_validation": "Fail"}),
        ("checkpoint_tag_validation_mode", {"tag_validation": "Fail"}, "FAIL"),
        ("checkpoint_parallel_write_pipeline", {"parallel_write": {"pipeline_stage": True}}, True),
        ("gradient_allreduce_op", {}, "mean"),
        ("gradient_allreduce_op", {"gradient_allreduce_op": "SUM"}, "sum"),
        ("communication_data_type", {}, None),
        ("communication_data_type", {"communication_data_type": "FP16"}, torch.float16),
        ("torch_autocast_dtype", {"torch_autocast": {"dtype": "torch.bfloat16"}}, torch.bfloat16),
        ("torch_autocast_enabled", {}, False),
    ],
)
def test_a_value_is_read_from_a_dict_as_deepspeed_reads_it(name: str, given: dict[str, Any], value: Any) -> None:
    assert getattr(readers, f"get_{name}")(given) == value
    assert f"get_{name}" in readers.__all__


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("float16", {"fp16": {"enabled": True}}, {"enabled": True, "hysteresis": 2}),
        ("zero", {"zero_optimization": True}, {"stage": 1}),
        ("zero", {"zero_optimization": {"stage3_max_live_parameters": 9}}, {"stage": 0, "max_live_parameters": 9}),
        ("tensor_parallel", {"tensor_parallel": {"autotp_size": 2}}, {"autotp_size": 2, "tp_overlap_comm": False}),
        ("expert_parallel", {}, {"enabled": False, "autoep_size": 1}),
        ("hybrid_engine", {"hybrid_engine": {"max_out_tokens": 3}}, {"enabled": False, "max_out_tokens": 3}),
        ("timers", {"timers": {"throughput": {"enabled": False}}}, {"enabled": False, "synchronized": True}),
    ],
)
def test_a_section_is_built_with_its_defaults(name: str, given: dict[str, Any], values: dict[str, Any]) -> None:
    built = getattr(readers, f"get_{name}_config")(given)
    assert {key: getattr(built, key) for key in values} == values
    key = "zero_optimization" if name == "zero" else "fp16" if name == "float16" else name
    with pytest.raises(ValueError, match="bogus"):
        getattr(readers, f"get_{name}_config")(
            {key: {"throughput": {"bogus": 1}} if name == "timers" else {"bogus": 1}}
        )


def test_sections_that_deepspeed_reads_as_dicts_have_its_defaults() -> None:
    aio = readers.get_aio_config({"aio": {"block_size": 2048, "unknown": 1}})
    assert aio["block_size"] == 2048 and "unknown" not in aio
    assert (aio["queue_depth"], aio["overlap_events"], aio["single_submit"]) == (8, True, False)
    section = readers.get_checkpoint_config({"checkpoint": {"tag_validation": "Fail"}})
    assert section == {"tag_validation": "FAIL", "checkpoint_serialization": True, "writer": None}
    data = readers.get_data_efficiency_config({"data_efficiency": {"seed": 7}})
    assert (data["enabled"], data["seed"], data["data_sampling"]["num_epochs"]) == (False, 7, 1000)
    assert readers.get_scalar_param({}, "a", 2) == 2


def test_a_key_that_is_twice_in_a_file_is_a_value_error() -> None:
    assert json.loads('{"a": 1, "b": 2}', object_pairs_hook=refuse_duplicates) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"Duplicate keys in DeepSpeed config: \['a'\]"):
        json.loads('{"a": 1, "a": 2}', object_pairs_hook=refuse_duplicates)


def test_the_pipelines_section_has_deepspeeds_defaults() -> None:
    section = readers.get_pipeline_config({"pipeline": {"stages": 2}})
    assert (section["stages"], section["partition"]) == (2, "best")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gradient_allreduce_op", {"gradient_allreduce_op": "max"}),
        ("gradient_allreduce_op", {"gradient_allreduce_op": None}),
        ("communication_data_type", {"communication_data_type": "bfp16"}),
        ("torch_autocast_dtype", {"torch_autocast": {"dtype": "x"}}),
        ("checkpoint_tag_validation_mode", {"tag_validation": "x"}),
    ],
)
def test_a_value_that_cannot_be_is_a_value_error(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        getattr(readers, f"get_{name}")(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op"),
        ({"communication_data_type": "x"}, "Invalid communication_data_type"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be simultaneously enabled"),
        ({"data_types": {"param_dtype": "bf16"}}, "conflicts with the enabled precision mode"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "Duplicate keys in DeepSpeed config"),
    ],
)
def test_errors_of_a_configuration_have_the_words_that_scripts_match(given: Any, words: str) -> None:
    config = {"train_batch_size": 1, **given} if isinstance(given, dict) else given
    with pytest.raises(AssertionError, match=words) as caught:
        readers.DeepSpeedConfig(config)
    assert isinstance(caught.value, ConfigError)
    if isinstance(given, dict):
        assert words not in str(examine(config).problems), "Shoal's own message has Shoal's words alone"


def test_levels_of_the_log_are_read_and_compared() -> None:
    assert get_log_level_from_string("Warning") == 30
    before = logger.level
    logger.setLevel("INFO")
    try:
        assert get_current_level() == 20
        assert (should_log_le("info"), should_log_le("error"), should_log_le("debug")) == (True, True, False)
    finally:
        logger.setLevel(before)
    for wrong in ("loud", 10):
        with pytest.raises(ValueError, match="is not"):
            should_log_le(wrong)  # type: ignore[arg-type]
