"""``zero_optimization``: what is sharded over the data-parallel ranks, and in which memory it is stored."""

from __future__ import annotations

import sys
from typing import Any, Literal

from shoal.config.base import Auto, Section, key, section
from shoal.config.tables import with_unsupported

Tier = Literal["none", "cpu", "nvme"]


class LeafModule(Section):
    """Modules whose whole subtree is gathered and released as one unit."""

    classes: tuple[str, ...] = key((), "class names of modules that are one unit with everything inside them")
    names: tuple[str, ...] = key((), "full names (`model.layers.3.mlp`) of such modules")
    name_suffixes: tuple[str, ...] = key((), "endings of the full names of such modules (`mlp.experts`)")


class OffloadParam(Section):
    """Where sharded parameters are stored between uses (stage 3)."""

    device: Tier = key("none", "none: on the device; cpu: in host memory; nvme: on a disk")
    nvme_path: str | None = key(None, "folder for parameters on a disk")
    buffer_count: int = key(5, "largest number of shards in host memory that are read ahead or being written", ge=1)
    buffer_size: int = key(100_000_000, "elements; at most buffer_count times this many are read ahead", ge=1)
    max_in_cpu: int = key(
        1_000_000_000, "elements of a rank's parameters stored in host memory when the device is nvme", ge=0
    )
    pin_memory: bool = key(True, "page-lock the host memory, for faster copies")


@with_unsupported("zero_optimization.offload_optimizer")
class OffloadOptimizer(Section):
    """Where main parameters and optimizer state are stored, and so where the update is computed."""

    device: Tier = key("none", "none: on the device; cpu: in host memory; nvme: on a disk")
    nvme_path: str | None = key(None, "folder for optimizer state on a disk")
    buffer_count: int = key(4, "staging buffers; at least the states that a parameter has (4 for Adam)", ge=1)
    pin_memory: bool = key(True, "page-lock the host memory, for faster copies")
    pipeline_read: bool = key(False, "read the next tile while this one is updated")
    pipeline_write: bool = key(False, "write the last tile while this one is updated")
    ratio: float = key(
        1.0, "share of the state that is updated on the host; the remainder stays on the device", ge=0, le=1
    )
    super_offload: bool = key(
        False, "begin updates on the host in the backward pass; needs host memory for the state twice"
    )
    cpuadam_cores_perc: float = key(0.8, "share of the host's cores for the update", gt=0, le=1)


class ZenFlowSection(Section):
    """Update important columns of each matrix in every step, on the device, and the other ones on the host later."""

    topk_ratio: float = key(0.1, "share of the columns of each parameter that are important", gt=0, le=1)
    select_strategy: Literal["auto", "step", "epoch"] = key(
        "auto", "what `select_interval` counts: steps or epochs; auto: the columns are chosen once an epoch"
    )
    select_interval: int | Auto = key("auto", "steps (or epochs) between two choices of the columns", ge=1)
    update_interval: int | Auto = key(
        "auto",
        "gradients in one update of the other columns; auto: as many as `auto_ratio` says",
        ge=1,
    )
    overlap_step: bool = key(
        False, "the update of the other columns runs during the next interval, and is seen by the model at its end"
    )
    offload: bool = key(False, "keep the state of the important columns in host memory between steps, too")
    auto_ratio: float = key(
        0.99,
        "with update_interval auto, update a unit when in this share of its parameters the summed gradient of the other"
        " columns has reached the size of one gradient of the important ones",
        ge=0,
        le=1,
    )
    full_warm_up_rounds: int = key(0, "steps at the start that update all columns", ge=0)
    steps_per_epoch: int | None = key(
        None,
        "steps of an epoch, for select_strategy epoch and auto; null: those of `training_data`, and without it the"
        " columns are chosen once",
        ge=1,
    )
    pt_reserved_cores_perc: float = key(
        0.5, "with overlap_step, share of the host's cores that updates leave to PyTorch", ge=0, le=1
    )

    def steps_between_choices(self, steps_per_epoch: int | None) -> int | None:
        """Steps after which the columns are chosen anew; None: never."""
        interval = 1 if self.select_interval == "auto" else self.select_interval
        if self.select_strategy == "step":
            return interval
        return None if steps_per_epoch is None else interval * steps_per_epoch


class LoCo(Section):
    """Error feedback for gradients that are reduced in few bits."""

    err_beta: float = key(
        0.8, "share of the last error in the new one; the rest is what the reduction loses", ge=0, le=1
    )
    reset_T: int = key(1024, "steps between two resets of the error", ge=1)


Format = Literal["bf16", "fp16", "fp8", "int8", "int4", "int4_hadamard", "1bit"]


class WireOfUnit(Section):
    """Formats of the units that a pattern matches."""

    gather: Format | Literal["none"] | None = key(
        None, "of gathered parameters; null: as for all units; none: as they are"
    )
    reduce: Format | Literal["none"] | None = key(
        None, "of reduced gradients; null: as for all units; none: as they are"
    )


class WireSection(Section):
    """Shoal's own: the formats in which parameters, gradients and activations are sent. A format of few bits has a
    scale for each block of elements.
    """

    gather: Format | None = key(None, "parameters when they are gathered; null: as they are stored")
    frozen: Format | None = key(None, "frozen parameters when they are gathered; null: as `gather` says")
    reduce: Format | None = key(None, "gradients when they are summed over data-parallel ranks; null: as they are")
    between_nodes: Format | None = key(
        None, "gradients between nodes, where each node sums its own first; null: summed over all ranks at once"
    )
    block: int | None = key(None, "elements that share a scale, a multiple of 32; null: 256, of 1bit 512", ge=32)
    difference: bool = key(
        False, "at stages 1 and 2, send how parameters differ from those that every rank has, in the format of `gather`"
    )
    error_feedback: bool = key(False, "add what the format of `reduce` loses to what the next reduction sends")
    error_decay: float = key(
        0.0, "share of the last error in the new one; the rest is what the reduction loses", ge=0, lt=1
    )
    error_reset: int | None = key(None, "steps between two resets of the error; null: never", ge=1)
    hierarchical_gather: bool = key(False, "gather between nodes first, then inside of each node")
    ranks_per_node: int | Literal["auto"] = key("auto", "data-parallel ranks of one node; auto: by host name")
    experts: Format | None = key(
        None, "tokens on their way to experts and back, and their gradients; null: as they are"
    )
    pipeline: Format | None = key(None, "activations between pipeline stages, and their gradients; null: as they are")
    tensor: Format | None = key(
        None, "activations that tensor-parallel layers sum and gather, and their gradients; null: as they are"
    )
    sequence: Format | None = key(
        None, "heads of attention between ranks of `sp`, and their gradients; null: as they are"
    )
    units: dict[str, WireOfUnit] = key({}, "by a pattern of unit names (`layers.*`): other formats for these")


class LocalStepsSection(Section):
    """Shoal's own: each replica takes steps of its own, and an outer optimizer brings the replicas together from time
    to time (DiLoCo).
    """

    every: int | None = key(
        None, "steps between two synchronisations; null: gradients are summed over all replicas in each step", ge=1
    )
    outer_lr: float = key(0.7, "learning rate of the outer SGD", gt=0, allow_inf_nan=False)
    outer_momentum: float = key(0.9, "momentum of the outer SGD", ge=0, lt=1)
    nesterov: bool = key(True, "Nesterov's momentum in the outer SGD")
    fragments: int = key(
        1, "groups of units, each of which is synchronised in another step of the round (Streaming DiLoCo)", ge=1
    )
    wire: Format | None = key(None, "format in which the replicas send outer gradients; null: fp32")
    block: int | None = key(None, "elements that share a scale, a multiple of 32; null: 256, of 1bit 512", ge=32)
    error_feedback: bool = key(False, "add what the format of `wire` loses to what the next synchronisation sends")


@with_unsupported("zero_optimization")
class ZeroOptimization(Section):
    """What is sharded over the data-parallel ranks, and how it is communicated."""

    stage: Literal[0, 1, 2, 3] = key(
        0,
        "what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too; auto: `initialize` plans it"
        " for the model and the machine",
    )
    reduce_bucket_size: int = key(500_000_000, "largest number of elements in one reduction", ge=1)
    overlap_comm: bool | None = key(
        None,
        "reduce gradients during the backward pass; null is true at every stage (DeepSpeed: at stage 3)",
        deprecated=("comm_overlap",),
    )
    nccl_ub: bool | Literal["symmetric"] = key(
        False,
        "at stages 2 and 3, allocate the buffers that are gathered and reduced in memory that is registered with NCCL, "
        "which then copies less and takes fewer multiprocessors; symmetric: in symmetric windows, where torch and NCCL "
        "have them. Without NCCL no effect",
    )
    ignore_unused_parameters: bool = key(
        True, "accept parameters that got no gradient in a step; false makes them an error"
    )
    sub_group_size: int = key(
        1_000_000_000,
        "largest number of elements that an accelerator updates in one call of the optimizer; at least 512 Ki",
        ge=1,
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000,
        "most elements that are gathered ahead at the use of a unit, or one unit; uses gather ahead until "
        "stage3_max_live_parameters; 0 gathers nothing ahead",
        alias=("prefetch_bucket_size",),
        ge=0,
    )
    stage3_param_persistence_threshold: int = key(
        100_000,
        "parameters with fewer elements are replicated",
        alias=("param_persistence_threshold",),
        deprecated=("stage3_param_persitance_threshold",),
        ge=0,
    )
    stage3_model_persistence_threshold: int = key(
        sys.maxsize,
        "largest total number of elements that are replicated",
        alias=("model_persistence_threshold",),
        ge=0,
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000,
        "largest number of elements that are gathered ahead or kept; the next unit is gathered ahead if it alone has "
        "no more, and always where this key is not given",
        alias=("max_live_parameters",),
        ge=0,
    )
    stage3_max_reuse_distance: int = key(
        0,
        "keep a unit gathered if it is used again within this many elements; 0 releases after each forward, "
        "except the units with which backward begins (DeepSpeed's default of 1e9 may keep much of a model gathered)",
        alias=("max_reuse_distance",),
        ge=0,
    )
    overlap_param_gather: bool | Auto = key(
        "auto",
        "at stages 1 and 2, step() does not wait until parameters are updated on the host (offload_optimizer) and "
        "gathered: the next forward waits, unit by unit; what reads a parameter before waits for it, but inside of a "
        "mode of torch it reads as NaN; auto: on accelerators",
    )
    enable_sanity_checks: bool = key(False, "raise an error for changes that GatheredParameters would lose")
    zero_hpz_partition_size: int = key(1, "ranks of one group in the second sharding of the parameters (hpZ)", ge=0)
    mics_shard_size: int = key(-1, "ranks of one shard group (MiCS): shard inside it, replicate over the groups", ge=-1)
    mics_hierarchical_params_gather: bool = key(False, "gather between nodes first, then inside of each node (MiCS)")
    zero_quantized_weights: bool = key(False, "at stage 3, gather parameters in 8 bits (qwZ)")
    zero_quantized_nontrainable_weights: bool = key(False, "at stage 3, gather frozen parameters in 8 bits")
    zero_quantized_gradients: bool = key(
        False, "reduce gradients in 8 bits inside of a node and in 4 bits between nodes (qgZ)"
    )
    zeropp_loco_param: LoCo | None = key(None, "error feedback for zero_quantized_gradients (LoCo)")
    leaf_module: LeafModule = section(LeafModule, "modules that are one unit with everything inside them")
    offload_param: OffloadParam = section(OffloadParam, "where sharded parameters are stored between uses")
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer, "where optimizer state is stored")
    zenflow: ZenFlowSection | None = key(
        None, "update important columns of gradients at once, and the other ones on the host later; null: no"
    )


def rewrite_old_keys(zero: dict[str, Any]) -> list[tuple[str, str]]:
    """Replace ``cpu_offload`` and related keys, in place, by the sections that have replaced them.

    Returns: (old key, its replacement) for each old key.
    """
    replaced = []
    for old, target in OLD_KEYS.items():
        if "." not in target and old in zero:
            asked = zero.pop(old)
            if str(asked).lower() == "true" and not zero.get(target):
                zero[target] = {"device": "cpu"}
            replaced.append((old, f'"{target}": {{"device": "{"cpu" if str(asked).lower() == "true" else "none"}"}}'))
    if "cpu_offload_use_pin_memory" in zero:
        pin = zero.pop("cpu_offload_use_pin_memory")
        for target in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(target), dict):
                zero[target] = {"pin_memory": pin, **zero[target]}
        replaced.append(("cpu_offload_use_pin_memory", '"pin_memory" in offload_optimizer and offload_param'))
    return replaced


OLD_KEYS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory",
}
