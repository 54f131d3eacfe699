"""Keys that are supported, set where they cannot have an effect: each is reported, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import load
from shoal.config.base import walk
from shoal.config.schema import Schema
from shoal.config.support import support_of
from shoal.config.supported import unused_reasons


def unused(config: dict[str, Any]) -> list[str]:
    return [line for line in load({"train_batch_size": 4, **config}, world_size=4).notes() if "no effect here" in line]


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


STAGE_3 = "no effect here: only stage 3 shards parameters, and this is stage 2."
AWAY = "zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (zero(0, mics_shard_size=2), "zero_optimization.mics_shard_size = 2: no effect here: stage 0 shards nothing."),
        ({"parallel": {"dp_shard": 2}}, "parallel.dp_shard = 2: no effect here: stage 0 shards nothing."),
        (
            {"expert_parallel": {"rebalance_every": 5}},
            "expert_parallel.rebalance_every = 5: no effect here: one rank holds all experts of a layer.",
        ),
        (
            {**zero(3), "expert_parallel": {"gather_if_used": True}},
            "expert_parallel.gather_if_used = true: no effect here: only stage 3 with zero_optimization.offload_param"
            " reads parameters where they are used.",
        ),
        (
            {"parallel": {"ep": 2}, "expert_parallel": {"hot_experts": 2}},
            "expert_parallel.hot_experts = 2: no effect here: copies are chosen each rebalance_every steps, and that"
            " is 0.",
        ),
        (zero(2, zero_hpz_partition_size=2), f"zero_optimization.zero_hpz_partition_size = 2: {STAGE_3}"),
        (zero(2, stage3_prefetch_bucket_size=0), f"zero_optimization.stage3_prefetch_bucket_size = 0: {STAGE_3}"),
        (zero(2, stage3_max_live_parameters=9), f"zero_optimization.stage3_max_live_parameters = 9: {STAGE_3}"),
        (
            zero(2, offload_optimizer={"super_offload": True}),
            f"{AWAY}.super_offload = true: no effect here: {AWAY}.device is not set.",
        ),
        (
            zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/x", "super_offload": True}),
            f'{AWAY}.super_offload = true: no effect here: {AWAY}.device is "nvme".',
        ),
        (
            zero(3, offload_param={"device": "cpu", "max_in_cpu": 3}),
            "zero_optimization.offload_param.max_in_cpu = 3: no effect here: "
            'zero_optimization.offload_param.device is "cpu".',
        ),
        (
            {"offload": "auto", **zero(3, offload_optimizer={"ratio": 0.5, "nvme_path": "/x"})},
            f'{AWAY}.ratio = 0.5: no effect here: "offload": "auto" decides.',
        ),
        ({"aio": {"block_size": 4096}}, "aio.block_size = 4096: no effect here: nothing is offloaded to a disk."),
        ({"fp16": {"loss_scale": 8}}, "fp16.loss_scale = 8: no effect here: fp16.enabled is not set."),
        (
            {"fp16": {"enabled": True, "loss_scale": 8, "loss_scale_window": 5}},
            "fp16.loss_scale_window = 5: no effect here: fp16.loss_scale is 8, which never changes.",
        ),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}, "precision": {"nonfinite": "skip"}},
            'bf16.check_grad_overflow = false: no effect here: precision.nonfinite = "skip" decides.',
        ),
        (
            {"communication_data_type": "fp32", "precision": {"reduce_dtype": "bf16"}},
            'precision.reduce_dtype = "bf16": no effect here: communication_data_type = "fp32" has priority.',
        ),
        (
            {"pipeline": {"stages": 2, "split_points": ["blocks.1"], "partition": "uniform"}},
            'pipeline.partition = "uniform": no effect here: pipeline.split_points names the boundaries.',
        ),
        (
            {"checkpoint": {"keep_every": 5}},
            "checkpoint.keep_every = 5: no effect here: checkpoint.keep_last is 0, so no checkpoint is removed.",
        ),
        (
            {"csv_monitor": {"job_name": "x"}},
            'csv_monitor.job_name = "x": no effect here: csv_monitor.enabled is not set.',
        ),
    ],
)
def test_a_key_that_has_no_effect_beside_the_others_is_reported(config: dict[str, Any], line: str) -> None:
    assert unused(config) == [line]


@pytest.mark.parametrize(
    "config",
    [
        zero(1, mics_shard_size=2),
        zero(3, stage3_prefetch_bucket_size=0, stage3_max_live_parameters=9, zero_hpz_partition_size=2),
        zero(2, stage3_prefetch_bucket_size=50_000_000, stage3_max_live_parameters="auto"),  # the default; whatever
        zero(2, offload_optimizer={"device": "none", "super_offload": True}),  # switched off in so many words
        zero(2, offload_optimizer={"device": "cpu", "super_offload": True, "ratio": 0.5, "cpuadam_cores_perc": 0.5}),
        {
            **zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/x", "pin_memory": False}),
            "aio": {"queue_depth": 3},
        },
        zero(3, offload_param={"device": "nvme", "nvme_path": "/x", "buffer_count": 2, "max_in_cpu": 3}),
        {
            "offload": "auto",
            **zero(3, offload_param={"nvme_path": "/x", "pin_memory": False}),
            "aio": {"block_size": 9},
        },
        {"fp16": {"enabled": False, "loss_scale": 8}},
        {"fp16": {"enabled": True, "loss_scale_window": 5, "auto_cast": True}},
        {"checkpoint": {"keep_every": 5, "keep_last": 2}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"precision": {"reduce_dtype": "bf16", "nonfinite": "skip"}},
        {"expert_parallel": {"load_balance_coeff": 0.001}},
        {"parallel": {"ep": 2}, "expert_parallel": {"rebalance_every": 5, "hot_experts": 1}},
    ],
)
def test_a_key_that_has_an_effect_or_was_left_at_its_default_needs_no_line(config: dict[str, Any]) -> None:
    assert unused(config) == []


def test_every_listed_key_is_one_that_is_supported() -> None:
    supported = {path for path, key in walk(Schema) if key.model is None and support_of(path).kind == "supported"}
    assert set(unused_reasons(load({}))) <= supported


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_a_format_of_gathers_is_no_error_where_nothing_is_gathered(key: str, stage: int) -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage, key: True}}
    said = f"zero_optimization.{key} = true: no effect here: only stage 3 shards parameters, and this is stage"
    assert f"{said} {stage}." in load(config, world_size=1).notes()
    config["zero_optimization"] = {"stage": 3, key: True}
    assert not [note for note in load(config, world_size=1).notes() if key in note]
