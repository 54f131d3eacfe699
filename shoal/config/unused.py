"""Keys that are obeyed in general and have no effect beside the other keys of a file; a line at start names each."""

from __future__ import annotations

from shoal.config.schema import Schema


def unused_reasons(config: Schema) -> dict[str, str]:
    """For each key that may have no effect, the reason in this configuration; empty where it has one.

    The keys are those of sections that are on, by their paths in the schema.
    """
    zero, is_auto = config.zero_optimization, config.offload == "auto"
    param, state = zero.offload_param, zero.offload_optimizer
    nonfinite, wire = config.precision.nonfinite, config.communication_data_type
    elasticity = config.elasticity
    param_is = f'zero_optimization.offload_param.device is "{param.device}"'
    state_is = f'zero_optimization.offload_optimizer.device is "{state.device}"'
    auto = '"offload": "auto" decides'
    has_disk = "nvme" in (param.device, state.device) or bool(is_auto and (param.nvme_path or state.nvme_path))
    checks: list[tuple[bool, str, str, str]] = [  # is used, the reason where not, section, keys
        (
            zero.stage == 3,
            f"only stage 3 shards parameters, and this is stage {zero.stage}",
            "zero_optimization.",
            "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold"
            " stage3_max_live_parameters stage3_max_reuse_distance zero_hpz_partition_size"
            " leaf_module.classes leaf_module.names leaf_module.name_suffixes",
        ),
        (
            zero.stage in (1, 2),
            f"the step gathers parameters at stages 1 and 2, and this is stage {zero.stage}",
            "zero_optimization.",
            "overlap_param_gather",
        ),
        (zero.stage != 0, "stage 0 shards nothing", "", "zero_optimization.mics_shard_size"),
        (zero.stage != 0, "stage 0 shards nothing", "parallel.", "dp_shard dp_replicate"),
        (
            not elasticity.enabled,
            "elasticity decides the batch sizes",
            "",
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        ),
        (elasticity.version > 0.1, "elasticity.version 0.1 knows ranks only", "elasticity.", "num_gpus_per_node"),
        (
            param.device == "nvme" and not is_auto,
            auto if is_auto else param_is,
            "zero_optimization.offload_param.",
            "buffer_count buffer_size max_in_cpu",
        ),
        (is_auto or param.device != "none", param_is, "zero_optimization.offload_param.", "pin_memory"),
        (is_auto or param.device == "nvme", param_is, "zero_optimization.offload_param.", "nvme_path"),
        (
            is_auto or state.device != "none",
            state_is,
            "zero_optimization.offload_optimizer.",
            "pin_memory cpuadam_cores_perc",
        ),
        (is_auto or state.device == "nvme", state_is, "zero_optimization.offload_optimizer.", "nvme_path"),
        (is_auto or state.device == "cpu", state_is, "zero_optimization.offload_optimizer.", "super_offload"),
        (
            state.device != "none" and not is_auto,
            auto if is_auto else state_is,
            "zero_optimization.offload_optimizer.",
            "ratio",
        ),
        (has_disk, "nothing is offloaded to a disk", "aio.", "block_size queue_depth intra_op_parallelism"),
        (has_disk, "nothing is offloaded to a disk", "debug.", "disk_sums"),
        (
            not config.fp16.loss_scale,
            f"fp16.loss_scale is {config.fp16.loss_scale:g}, which never changes",
            "fp16.",
            "initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
        ),
        (nonfinite is None, f'precision.nonfinite = "{nonfinite}" decides', "bf16.", "check_grad_overflow"),
        (wire is None, f'communication_data_type = "{wire}" has priority', "precision.", "reduce_dtype"),
        (
            config.checkpoint.keep_last > 0,
            "checkpoint.keep_last is 0, so no checkpoint is removed",
            "checkpoint.",
            "keep_every",
        ),
    ]
    return {
        f"{section}{name}": "" if is_used else reason
        for is_used, reason, section, names in checks
        for name in names.split()
    }
