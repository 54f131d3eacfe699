"""Names of DeepSpeed's engine as tables: values of the config, attributes of Shoal's engine, and names that are absent.

A name of DeepSpeed's engine that Shoal does not have raises an error: otherwise it would be taken for the attribute of
the same name that the user's model may have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.config import Config
from shoal.engine.settings import DTYPES
from shoal.running.foreign_names import AbsentError

# What the path in the configuration begins with, what the method begins with: what both end with.
_ALIKE = {
    ("", ""): (
        "memory_breakdown wall_clock_breakdown dump_state log_level steps_per_print managed_gradient_accumulation"
        " dataloader_drop_last gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
    ),
    ("zero_optimization.", "zero_"): (
        "reduce_scatter overlap_comm sub_group_size reduce_bucket_size allgather_bucket_size allgather_partitions"
        " round_robin_gradients contiguous_gradients load_from_fp32_weights elastic_checkpoint legacy_stage1"
        " ignore_unused_parameters save_muon_momentum_buffer_in_memory log_trace_cache_warnings"
    ),
    ("zero_optimization.stage3_", "zero_"): (
        "max_live_parameters max_reuse_distance prefetch_bucket_size module_granularity_threshold"
        " param_persistence_threshold model_persistence_threshold gather_16bit_weights_on_model_save"
        " allgather_sequential"
    ),
    ("fp16.", "fp16_"): "enabled auto_cast",
    ("torch_autocast.", "torch_autocast_"): "enabled lower_precision_safe_modules",
    ("flops_profiler.", "flops_profiler_"): (
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"
    ),
    ("autotuning.", "autotuning_"): "enabled start_profile_step end_profile_step metric metric_path",
    ("progressive_layer_drop.", "pld_"): "enabled theta gamma",
}
# method -> path in the configuration
PATHS = {
    **{method + end: path + end for (path, method), ends in _ALIKE.items() for end in ends.split()},
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zenflow_config": "zero_optimization.zenflow",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "tensor_parallel_config": "tensor_parallel",
    "autotp_size": "tensor_parallel.autotp_size",
    "aio_config": "aio",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "checkpoint_writer_enabled": "checkpoint.writer",
    "is_deepcompile_enabled": "compile.deepcompile",
    "is_deepcompile_active": "compile.deepcompile",
    "data_efficiency_config": "data_efficiency",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
}


def _dtype(name: str | None) -> Any:
    return DTYPES[str(name).removeprefix("torch.")] if name is not None else None


def model_dtype(config: Config) -> torch.dtype:
    """The parameters' dtype, by the sections fp16 and bf16."""
    return DTYPES["fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"]


def _switched_on(section: Any) -> Any:
    return section if section is not None and section.device != "none" else None


def _is_offloaded(config: Config) -> bool:
    return getattr(config.zero_optimization.offload_optimizer, "device", "none") == "cpu"


# method -> what it returns
DERIVED: dict[str, Callable[[Config], Any]] = {
    "zero_optimization": lambda config: config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda config: config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.zero_optimization.stage >= 3,
    "is_first_weights_partition_group": lambda config: config.zero_optimization.stage >= 3,
    "zero_offload_optimizer": lambda config: _switched_on(config.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda config: _switched_on(config.zero_optimization.offload_param),
    "zero_cpu_offload": _is_offloaded,
    "zero_use_cpu_optimizer": _is_offloaded,
    "zero_partial_offload": lambda config: getattr(config.zero_optimization.offload_optimizer, "ratio", 1.0),
    "super_offload": lambda config: bool(getattr(config.zero_optimization.offload_optimizer, "super_offload", False)),
    "cpuadam_cores_perc": lambda config: getattr(config.zero_optimization.offload_optimizer, "cpuadam_cores_perc", 0.9),
    "zero_nvme_offload_optimizer": lambda config: (
        getattr(config.zero_optimization.offload_optimizer, "device", "none") == "nvme"
    ),
    "postscale_gradients": lambda config: not config.prescale_gradients,
    "optimizer_params": lambda config: dict(config.optimizer.params) if config.optimizer is not None else None,
    "optimizer_legacy_fusion": lambda config: config.optimizer is not None and bool(config.optimizer.legacy_fusion),
    "scheduler_name": lambda config: config.scheduler.type if config.scheduler is not None else None,
    "scheduler_params": lambda config: dict(config.scheduler.params) if config.scheduler is not None else None,
    "dynamic_loss_scale": lambda config: bool(config.fp16.enabled) and float(config.fp16.loss_scale) == 0.0,
    "initial_dynamic_scale": lambda config: 2.0 ** int(config.fp16.initial_scale_power),
    "dynamic_loss_scale_args": lambda config: {
        "init_scale": 2 ** int(config.fp16.initial_scale_power),
        "scale_window": int(config.fp16.loss_scale_window),
        "delayed_shift": int(config.fp16.hysteresis),
        "consecutive_hysteresis": bool(config.fp16.consecutive_hysteresis),
        "min_scale": float(config.fp16.min_loss_scale),
    },
    "is_elastic_model_parallel_supported": lambda config: (
        config.elasticity.enabled and config.elasticity.num_gpus_per_node % config.elasticity.model_parallel_size == 0
    ),
    "curriculum_params_legacy": lambda config: (
        config.curriculum_learning.model_dump(exclude_none=True) if config.curriculum_learning.enabled else False
    ),
    "pld_params": lambda config: (
        config.progressive_layer_drop.model_dump() if config.progressive_layer_drop.enabled else False
    ),
    "torch_autocast_dtype": lambda config: _dtype(config.torch_autocast.dtype),
    "get_data_types": lambda config: (
        model_dtype(config),
        _dtype(config.data_types.grad_accum_dtype) or model_dtype(config),
    ),
    "checkpoint_tag_validation_enabled": lambda config: config.checkpoint.tag_validation != "Ignore",
    "checkpoint_tag_validation_fail": lambda config: config.checkpoint.tag_validation == "Fail",
    "compile_zero_optimization_stage": lambda _config: False,
    "compile_autosp": lambda _config: False,
    "compile_autotp": lambda _config: False,
    "uses_parallelization_pass_only": lambda _config: False,
}

# name -> the attribute of Shoal's engine that it is
ATTRIBUTES = {
    "basic_optimizer": "client_optimizer",
    "seq_dp_world_size": "axes.data.size",
    "dist_backend": "world.backend",
    "loaded_checkpoint_dp_world_size": "checkpointing.loaded_size",
    "progressive_layer_drop": "run_state.curriculum.layer_drop",
}

# What to do instead of using names that are not here.
_INSTEAD = {
    "gradients are reduced unit by unit during backward; take no_sync() to leave it out": (
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback enable_backward_allreduce"
    ),
    "step() clips by gradient_clipping": "clip_fp32_gradients",
    "call gc.collect()": "collect_python_gc",
    "print, or call deepspeed.log_dist(), on the ranks that you choose": "log_for_device",
    "steps_per_print prints the throughput": "tput_log",
    "call see_memory_usage(), or set memory_breakdown": "mem_status",
    "initialize(training_data=...) takes either kind of dataset": "is_map_style_dataset is_iterable_style_dataset",
    "parameters lie in buckets at offsets of Shoal's own": "zero_parameter_alignment",
    "get_global_grad_norm() has the norm of each step": "zero_compute_grad_norm",
    "load_checkpoint() reads experts with the rest": "load_moe_state_dict",
    "DeepCompile is not built; take engine.compile()": (
        "register_compile_pass get_deepcompile_backend get_deepspeed_compile_backend get_autosp_backend"
        " get_autotp_backend get_compile_time"
    ),
    "take engine.timers (with wall_clock_breakdown) or engine.memory_report()": (
        "engine_timers engine_timers_cache tput_timer print_forward_breakdown"
    ),
    "autotuning finds micro-batches by runs": (
        "autotuning_model_info autotuning_model_info_path autotuning_profile_model_info"
    ),
    "take engine.save_checkpoint(); checkpoint.async_save saves while training continues": "checkpoint_engine",
    "client_optimizer.defaults has them": "get_optimizer_configuration",
    "zero_optimization.offload_* and aio in engine.config have it": "swap_tensor_config",
    "sparse gradients are reduced by backward(); torch.distributed reduces a script's own tensors": (
        "all_gather_scalar sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"
    ),
    "take engine.scale(loss) or engine.backward(loss)": "torch_autocast_z0_gradscaler",
}
NOT_HERE = {name: do for do, names in _INSTEAD.items() for name in names.split()}


def refuse(name: str) -> None:
    """Raises: AbsentError: DeepSpeed's engine has the name, and Shoal's does not."""
    if name in NOT_HERE:
        raise AbsentError(f"DeepSpeed's engine.{name} is not here.", do=f"{NOT_HERE[name]}.", code="engine-absent")


def value_at(config: Config, path: str) -> Any:
    """The value at a dotted path; None below a section that is None."""
    value: Any = config
    for part in path.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return value
