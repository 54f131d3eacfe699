"""Keys that are obeyed in general and have no effect beside the others of this file: each is told of at start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.config.schema import Schema

Reason = Callable[[Schema], str]  # why a key has no effect here; empty: it has one


def why_unused(config: Schema, path: str) -> str:
    """Why a key of a section that is on has no effect in this configuration; empty where it has one.

    Args:
        path: in the schema.
    """
    reason = _UNUSED.get(path)
    return reason(config) if reason is not None else ""


def _at(config: Schema, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _only_at_stage_3(config: Schema) -> str:
    stage = config.zero_optimization.stage
    return "" if stage == 3 else f"only stage 3 shards parameters, and this is stage {stage}"


def _not_at_stage_0(config: Schema) -> str:
    return "" if config.zero_optimization.stage else "stage 0 shards nothing"


def _is_away(section: str, *devices: str) -> Reason:
    path = f"zero_optimization.{section}.device"

    def reason(config: Schema) -> str:
        device = _at(config, path)
        return "" if device in devices or config.offload == "auto" else f'{path} is "{device}"'

    return reason


def _has_parameters_on_disk(config: Schema) -> str:
    if config.offload == "auto":
        return '"offload": "auto" decides'
    return _is_away("offload_param", "nvme")(config)


def _has_a_disk(config: Schema) -> str:
    zero = config.zero_optimization
    devices = (zero.offload_param.device, zero.offload_optimizer.device)
    has_path = zero.offload_param.nvme_path or zero.offload_optimizer.nvme_path
    return "" if "nvme" in devices or (config.offload == "auto" and has_path) else "nothing is offloaded to a disk"


def _has_state_away_by_key(config: Schema) -> str:
    if config.offload == "auto":
        return '"offload": "auto" decides'
    return _is_away("offload_optimizer", "cpu", "nvme")(config)


def _is_dynamic(config: Schema) -> str:
    return "" if not config.fp16.loss_scale else f"fp16.loss_scale is {config.fp16.loss_scale:g}, which never changes"


def _decides_nonfinite(config: Schema) -> str:
    nonfinite = config.precision.nonfinite
    return "" if nonfinite is None else f'precision.nonfinite = "{nonfinite}" decides'


def _nothing_goes_first(config: Schema) -> str:
    wire = config.communication_data_type
    return "" if wire is None else f'communication_data_type = "{wire}" goes first'


def _is_kept_at_all(config: Schema) -> str:
    return "" if config.checkpoint.keep_last else "checkpoint.keep_last is 0, so every checkpoint is kept"


def _not_beside_elasticity(config: Schema) -> str:
    return "elasticity decides the batch sizes" if config.elasticity.enabled else ""


def _not_in_version_01(config: Schema) -> str:
    return "" if config.elasticity.version > 0.1 else "elasticity.version 0.1 knows ranks only"


_OPT, _PAR = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"

_UNUSED: dict[str, Reason] = dict(
    (
        *(
            (f"zero_optimization.{name}", _only_at_stage_3)
            for name in (
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "zero_hpz_partition_size",
                "leaf_module.classes",
                "leaf_module.names",
                "leaf_module.name_suffixes",
            )
        ),
        *(
            (name, _not_beside_elasticity)
            for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        ),
        ("elasticity.num_gpus_per_node", _not_in_version_01),
        ("zero_optimization.mics_shard_size", _not_at_stage_0),
        ("parallel.dp_shard", _not_at_stage_0),
        ("parallel.dp_replicate", _not_at_stage_0),
        *((f"{_PAR}.{name}", _has_parameters_on_disk) for name in ("buffer_count", "buffer_size", "max_in_cpu")),
        (f"{_PAR}.pin_memory", _is_away("offload_param", "cpu", "nvme")),
        (f"{_PAR}.nvme_path", _is_away("offload_param", "nvme")),
        (f"{_OPT}.pin_memory", _is_away("offload_optimizer", "cpu", "nvme")),
        (f"{_OPT}.nvme_path", _is_away("offload_optimizer", "nvme")),
        (f"{_OPT}.ratio", _has_state_away_by_key),
        (f"{_OPT}.super_offload", _is_away("offload_optimizer", "cpu")),
        (f"{_OPT}.cpuadam_cores_perc", _is_away("offload_optimizer", "cpu", "nvme")),
        *((f"aio.{name}", _has_a_disk) for name in ("block_size", "queue_depth", "intra_op_parallelism")),
        ("debug.disk_sums", _has_a_disk),
        *(
            (f"fp16.{name}", _is_dynamic)
            for name in (
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "consecutive_hysteresis",
                "min_loss_scale",
            )
        ),
        ("bf16.check_grad_overflow", _decides_nonfinite),
        ("precision.reduce_dtype", _nothing_goes_first),
        ("checkpoint.keep_every", _is_kept_at_all),
    )
)
