"""Compares what a file asks for with what this version does: parts not built, keys refused, keys without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.normalise import Given, Normalised
from shoal.config.problems import Problem, shown
from shoal.config.schema import Schema
from shoal.config.support import (
    DEEPCOMPILE,
    PARAMS,
    SUPPORTED,
    SWITCHES,
    Support,
    SupportKind,
    support_of,
)

OFF: tuple[Any, ...] = (None, False, 0, "none", "", (), {})


@dataclass(frozen=True)
class KeySupport:
    """A key that the file sets, with its support.

    Args:
        asks: it asks for something.
        schema_path: its path in the schema, where it is set to something else than its default; else empty.
        off_switch: a key above it that the file does not set, so that the section is off; ``is_off``: it, or one that
            the file sets, is off.
        is_inside: a section above it has a support of its own.
    """

    path: str
    value: Any
    support: Support
    asks: bool
    schema_path: str = ""
    off_switch: str = ""
    is_off: bool = False
    is_inside: bool = False


def keys_with_support(reading: Normalised) -> list[KeySupport]:
    """Every key that the file sets, in its order."""
    keys = []
    for path, given in reading.given.items():
        if not given.schema_path:
            support = PARAMS.get(path.rpartition(".")[2], SUPPORTED)
            keys.append(KeySupport(path, given.value, support, asks=_is_on(given.value)))
            continue
        support = support_of(given.schema_path)
        is_changed = given.key.model is None and given.value is not None and given.value != given.key.default
        off = [
            switch for switch, default in given.switches if switch != path and _is_switch_off(switch, default, reading)
        ]
        keys.append(
            KeySupport(
                path,
                given.value,
                support,
                _asks(path, given, support, reading.given),
                given.schema_path if is_changed else "",
                off[0] if off and not any(name in reading.given for name in off) else "",
                bool(off),
                given.is_inside,
            )
        )
    return keys


def _is_switch_off(switch: str, default: Any, reading: Normalised) -> bool:
    given = reading.given.get(switch)
    return not _is_on(given.value if given is not None else default)


def unsupported_problems(
    keys: list[KeySupport], reading: Normalised, kinds: tuple[SupportKind, ...]
) -> Iterator[Problem]:
    """Problems for the keys that ask for something that Shoal does not do."""
    for each in keys:
        if not each.asks or each.support.kind not in kinds:
            continue
        what = f"{shown(each.value)} asks for a part that is not built yet: {each.support.reason}."
        do = f"{each.support.instead}."
        if each.support.kind == "refused":
            what, do = f"{shown(each.value)} is not supported.", f"{each.support.reason}."
        yield Problem(each.path, what, do, reading.line(each.path))


def _asks(path: str, given: Given, support: Support, all_given: Mapping[str, Given]) -> bool:
    """True if a key's value differs from its default, and no key above it is reported already."""
    value, key = given.value, given.key
    if given.is_inside or any(value == same and type(value) is type(same) for same in support.harmless):
        return False
    if key.model is not None:
        is_there = bool(value) or key.default is None  # {} switches a section on that is off when it is left out
        return is_there and value is not None and _is_on(value.get("enabled", True))
    switches = [(switch, default) for switch, default in given.switches if switch != path]
    if support.switch:
        switches = [(support.switch, None)]
    for switch, default in [] if support.stands_alone else switches:
        over = all_given.get(switch)
        if not _is_on(over.value if over is not None else default):
            return False
        if support_of(over.schema_path if over is not None else switch).kind == support.kind:
            return False  # reported at the switch
    return _is_on(value) if key.name in SWITCHES else _is_on(value) and bool(value != key.default)


def _is_on(value: Any) -> bool:
    return value not in OFF


def unused_reasons(config: Schema) -> dict[str, str]:
    """For each key that may have no effect, the reason in this configuration; empty where it has one.

    The keys are those of sections that are on, by their paths in the schema.
    """
    zero, is_auto = config.zero_optimization, config.offload == "auto"
    param, state = zero.offload_param, zero.offload_optimizer
    nonfinite, wire = config.precision.nonfinite, config.communication_data_type
    elasticity, experts = config.elasticity, config.expert_parallel
    sends = config.wire
    reduces = sends.reduce or zero.zero_quantized_gradients or any(unit.reduce for unit in sends.units.values())
    param_is = f'zero_optimization.offload_param.device is "{param.device}"'
    state_is = f'zero_optimization.offload_optimizer.device is "{state.device}"'
    flow = zero.zenflow
    auto = '"offload": "auto" decides'
    is_local = config.local_steps.every is not None
    has_disk = "nvme" in (param.device, state.device) or bool(is_auto and (param.nvme_path or state.nvme_path))
    is_divided = config.parallel.ep not in ("auto", 1) or (experts.enabled and experts.autoep_size > 1)
    whole = "one rank holds all experts of a layer"
    is_offloaded = zero.stage == 3 and param.device in ("cpu", "nvme")
    no_copies = "copies are chosen each rebalance_every steps, and that is 0" if is_divided else whole
    on_disk = param.device == "nvme" and not is_auto
    checks: dict[str, tuple[bool, str]] = {  # by section and keys: True if they are used, and the reason where not
        "zero_optimization: stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters"
        " stage3_model_persistence_threshold stage3_max_reuse_distance zero_hpz_partition_size"
        " leaf_module.classes leaf_module.names leaf_module.name_suffixes zero_quantized_weights"
        " zero_quantized_nontrainable_weights": (
            zero.stage == 3,
            f"only stage 3 shards parameters, and this is stage {zero.stage}",
        ),
        "zero_optimization: nccl_ub": (zero.stage in (2, 3), "stages 0 and 1 gather and reduce in place"),
        "zero_optimization: overlap_param_gather": (
            zero.stage in (1, 2),
            f"the step gathers parameters at stages 1 and 2, and this is stage {zero.stage}",
        ),
        "zero_optimization: mics_shard_size": (zero.stage != 0 or is_local, "stage 0 shards nothing"),
        "parallel: dp_shard dp_replicate": (zero.stage != 0 or is_local, "stage 0 shards nothing"),
        "local_steps: outer_lr outer_momentum nesterov fragments wire": (
            is_local,
            "local_steps.every is not set",
        ),
        "local_steps: block error_feedback": (
            is_local and config.local_steps.wire is not None,
            "local_steps.wire is not set",
        ),
        "expert_parallel: rebalance_every": (is_divided, whole),
        "expert_parallel: gather_if_used": (
            is_offloaded,
            "only stage 3 with zero_optimization.offload_param reads parameters where they are used",
        ),
        "expert_parallel: hot_experts": (is_divided and experts.rebalance_every > 0, no_copies),
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps": (
            not elasticity.enabled,
            "elasticity decides the batch sizes",
        ),
        "elasticity: num_gpus_per_node": (elasticity.version > 0.1, "elasticity.version 0.1 counts ranks only"),
        "zero_optimization.offload_param: buffer_count buffer_size max_in_cpu": (
            on_disk,
            auto if is_auto else param_is,
        ),
        "zero_optimization.offload_param: pin_memory": (is_auto or param.device != "none", param_is),
        "zero_optimization.offload_param: nvme_path": (is_auto or param.device == "nvme", param_is),
        "zero_optimization.offload_optimizer: pin_memory cpuadam_cores_perc": (
            is_auto or state.device != "none",
            state_is,
        ),
        "zero_optimization.offload_optimizer: nvme_path": (is_auto or state.device == "nvme", state_is),
        "zero_optimization.offload_optimizer: super_offload": (is_auto or state.device == "cpu", state_is),
        "zero_optimization.offload_optimizer: ratio": (
            state.device != "none" and not is_auto,
            auto if is_auto else state_is,
        ),
        "zero_optimization.zenflow: auto_ratio": (
            flow is None or flow.update_interval == "auto",
            f"zero_optimization.zenflow.update_interval is {flow and flow.update_interval}",
        ),
        "zero_optimization.zenflow: steps_per_epoch": (
            flow is None or flow.select_strategy != "step",
            "zero_optimization.zenflow.select_strategy counts steps",
        ),
        "zero_optimization.zenflow: pt_reserved_cores_perc": (
            flow is None or flow.overlap_step,
            "zero_optimization.zenflow.overlap_step is false",
        ),
        "aio: block_size queue_depth intra_op_parallelism": (has_disk, "nothing is offloaded to a disk"),
        "debug: disk_sums": (has_disk, "nothing is offloaded to a disk"),
        "fp16: initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale": (
            not config.fp16.loss_scale,
            f"fp16.loss_scale is {config.fp16.loss_scale:g}, which never changes",
        ),
        "gradient_predivide_factor": (
            not config.prescale_gradients,
            "prescale_gradients divides by all ranks before the sum",
        ),
        "wire: gather hierarchical_gather difference": (zero.stage > 0, "stage 0 gathers nothing"),
        "zero_optimization: mics_hierarchical_params_gather": (zero.stage > 0, "stage 0 gathers nothing"),
        "wire: frozen": (
            zero.stage == 3,
            f"only stage 3 gathers frozen parameters, and this is stage {zero.stage}",
        ),
        "wire: between_nodes error_feedback": (bool(reduces), "gradients are sent as they are"),
        "wire: error_decay error_reset": (sends.error_feedback, "wire.error_feedback is false"),
        "zero_optimization.zeropp_loco_param: err_beta reset_T": (
            zero.zero_quantized_gradients,
            "zero_optimization.zero_quantized_gradients is false",
        ),
        "bf16: check_grad_overflow": (nonfinite is None, f'precision.nonfinite = "{nonfinite}" decides'),
        "precision: reduce_dtype": (wire is None, f'communication_data_type = "{wire}" has priority'),
        "pipeline: partition": (
            config.pipeline.split_points == "auto",
            "pipeline.split_points names the boundaries",
        ),
        f"compile: {' '.join(DEEPCOMPILE)}": (config.compile.deepcompile, "compile.deepcompile is not set"),
        "checkpoint: keep_every": (
            config.checkpoint.keep_last > 0,
            "checkpoint.keep_last is 0, so no checkpoint is removed",
        ),
    }
    reasons: dict[str, str] = {}
    for keys, (is_used, reason) in checks.items():
        section, _, names = keys.rpartition(": ")
        reasons |= {f"{section}.{name}".removeprefix("."): "" if is_used else reason for name in names.split()}
    return reasons
