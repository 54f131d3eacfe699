"""Configs as DeepSpeed's clients write them load."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.config import load
from shoal.config.problems import ConfigProblems, ConfigWarning
from shoal.engine.settings import plan_of
from shoal.sharding.placement import Tier

ACCELERATE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": math.inf,
    "fp16": {"enabled": True, "auto_cast": True},
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "zero_allow_untested_optimizer": True,
}
# Transformers' example for stage 3, as it is before the Trainer fills it.
TRANSFORMERS: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
LIGHTNING: dict[str, Any] = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
        "offload_param": {
            "device": "cpu",
            "nvme_path": "/local_nvme",
            "buffer_count": 5,
            "buffer_size": 100_000_000,
            "max_in_cpu": 1_000_000_000,
            "pin_memory": False,
        },
        "offload_optimizer": {
            "device": "cpu",
            "nvme_path": "/local_nvme",
            "buffer_count": 4,
            "pin_memory": False,
        },
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
}


def test_accelerates() -> None:
    config = load(ACCELERATE, world_size=2)
    plan = plan_of(config, 2)
    assert config.steps_per_print == math.inf
    assert (config.fp16.enabled, config.fp16.auto_cast, config.bf16.enabled) == (True, True, False)
    assert (plan.zero.parameter_tier, plan.zero.state_tier) == (Tier.DEVICE, Tier.DEVICE)
    assert config.warnings == ()
    assert config.raw["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_transformers_with_every_auto() -> None:
    config = load(TRANSFORMERS)
    assert config.fp16.enabled is False
    assert config.zero_optimization.sub_group_size == 1_000_000_000
    assert config.unresolved_auto == (  # the others have defaults
        "optimizer.params.lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
    )


def test_lightnings() -> None:
    plan = plan_of(load(LIGHTNING, world_size=2), 2)
    assert plan.clip_norm == 0.0
    assert (plan.zero.parameter_tier, plan.zero.state_tier) == (Tier.HOST, Tier.HOST)


def test_trls_paths_written_as_keys_are_reported_and_left_out() -> None:
    flat = {
        "zero_optimization.reduce_bucket_size": 1024,
        "zero_optimization.stage3_param_persistence_threshold": 320,
        "zero_optimization.stage3_prefetch_bucket_size": 921.6,
    }
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, **flat}
    with pytest.warns(ConfigWarning, match="is ignored: a path written as one key"):
        config = load(settings)
    assert len(config.warnings) == 3
    assert config.zero_optimization.stage3_param_persistence_threshold == 100_000


@pytest.mark.parametrize("key", ["msamp", "inference"])
def test_keys_that_clients_add_for_themselves_are_reported_and_left_out(key: str) -> None:
    with pytest.warns(ConfigWarning, match=f"{key} = .* is ignored"):
        assert load({"train_batch_size": 2, key: {"enabled": True}}).train_batch_size == 2


def test_null_is_as_if_the_key_were_not_there() -> None:
    nulls = dict.fromkeys(
        (
            "train_batch_size",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "steps_per_print",
            "optimizer",
            "scheduler",
            "fp16",
            "wall_clock_breakdown",
        )
    )
    config = load({"train_micro_batch_size_per_gpu": 3, **nulls, "zero_optimization": {"stage": None}}, world_size=2)
    plain = load({"train_micro_batch_size_per_gpu": 3}, world_size=2)
    assert config.effective() == plain.effective()
    assert (config.train_batch_size, config.gradient_clipping, config.zero_optimization.stage) == (6, 1.0, 0)
    assert config.origin("gradient_clipping") == "default"


def test_unknown_keys_are_errors_or_with_strict_warn_reported_and_left_out() -> None:
    unknown: dict[str, Any] = {"train_batch_size": 2, "my_key": {"a": 1}, "zero_optimization": {"stage": 1, "other": 3}}
    with pytest.raises(ConfigProblems, match="my_key"):
        load(unknown)
    with pytest.warns(ConfigWarning, match="is ignored: no such key"):
        config = load({**unknown, "strict": "warn"})
    assert config.zero_optimization.stage == 1
    assert len(config.warnings) == 2
