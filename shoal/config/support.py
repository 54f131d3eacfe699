"""What this version does with each key: one table, path -> support. To change a support, edit a line here.

A path may end in ``**`` (everything below); the longest path that fits a key is the one that counts. A key that is
*not built* or *refused* is an error only when the file asks for something with it: its default, false, null, "none"
and 0 ask for nothing, and neither does a key below a section that is not switched on (``enabled``, ``device``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from shoal.config.unsupported import all_rows

SWITCHES = ("enabled", "device")  # keys that turn the section they are in on and off

SupportKind = Literal["obeyed", "no effect", "not built", "refused"]


@dataclass(frozen=True)
class Support:
    """What happens with a key.

    Args:
        reason: why it has no effect; the part that is missing; or what to use in a refused key's place.
        switch: the key that must be on before this one asks for anything; empty: ``enabled`` or ``device`` above it.
        harmless: more values that ask for nothing.
        stands_alone: it asks even where the section it is in is switched off.
    """

    kind: SupportKind
    reason: str = ""
    switch: str = ""
    harmless: tuple[Any, ...] = ()
    stands_alone: bool = False

    def __str__(self) -> str:
        if self.kind == "not built":
            return f"not built yet: {self.reason}"
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


OBEYED = Support("obeyed")


def no_effect(reason: str) -> Support:
    return Support("no effect", reason)


def not_built(part: str, *, switch: str = "", harmless: tuple[Any, ...] = (), stands_alone: bool = False) -> Support:
    return Support("not built", part, switch, harmless, stands_alone)


def refused(instead: str) -> Support:
    return Support("refused", instead)


OPT, PAR = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def _of_table() -> Iterator[tuple[str, Support]]:
    """The rules of the sections that are not supported."""
    for row in all_rows():
        if not row.support:
            continue
        kind, _, reason = row.support.partition(": ")
        conditions = row.conditions.split(", ")
        switch = "".join(each.removeprefix("switch ") for each in conditions if each.startswith("switch "))
        harmless = [json.loads(each.removeprefix("harmless ")) for each in conditions if each.startswith("harmless ")]
        support = Support(cast(SupportKind, kind), reason, switch, tuple(harmless), "stands alone" in conditions)
        if row.is_section:
            yield f"{row.path}.**", support
        if not row.is_section or row.takes.endswith("or null"):
            yield row.path, support


SUPPORT: dict[str, Support] = {
    **dict(_of_table()),
    # the batch, printing, gradients
    "train_batch_size": OBEYED,
    "train_micro_batch_size_per_gpu": OBEYED,
    "gradient_accumulation_steps": OBEYED,
    "managed_gradient_accumulation": OBEYED,
    "steps_per_print": OBEYED,
    "wall_clock_breakdown": OBEYED,
    "memory_breakdown": OBEYED,
    "dump_state": OBEYED,
    "disable_python_gc": no_effect("Python's collector is the script's: it may call gc.disable()"),
    "log_level": OBEYED,
    "dataloader_drop_last": OBEYED,
    "zero_allow_untested_optimizer": OBEYED,
    "zero_force_ds_cpu_optimizer": no_effect("every optimizer that works on the device works on the host too"),
    "communication_data_type": OBEYED,
    "seq_parallel_communication_data_type": not_built("sequence parallel", harmless=("fp32",)),
    "gradient_allreduce_op": OBEYED,
    "prescale_gradients": OBEYED,
    "gradient_predivide_factor": OBEYED,
    "sparse_gradients": OBEYED,
    "gradient_clipping": OBEYED,
    "disable_allgather": no_effect("DeepSpeed reads it and never uses it"),
    "allgather_size": no_effect('it counts only beside the old form "zero_optimization": true'),
    "graph_harvesting": not_built("CUDA graphs"),
    "vocabulary_size": no_effect("in DeepSpeed too it only prints a hint about multiples of 8"),
    "sequence_parallel_size": not_built("sequence parallel", harmless=(1,)),
    "data_parallel_size": no_effect("the number of data-parallel ranks follows from the number of ranks"),
    "use_data_before_expert_parallelism": not_built("expert parallel"),
    # zero_optimization
    "zero_optimization.stage": OBEYED,
    "zero_optimization.contiguous_gradients": no_effect("gradients always lie in one flat bucket for each unit"),
    "zero_optimization.reduce_scatter": no_effect("from stage 1 on, gradients always go to their owner only"),
    "zero_optimization.reduce_bucket_size": OBEYED,
    "zero_optimization.allgather_partitions": no_effect("updated parameters are always all-gathered, unit by unit"),
    "zero_optimization.allgather_bucket_size": no_effect(
        "buckets are gathered as they are; reduce_bucket_size bounds them"
    ),
    "zero_optimization.overlap_comm": OBEYED,
    "zero_optimization.use_multi_rank_bucket_allreduce": no_effect(
        "every rank owns a part of every bucket, so one reduce-scatter serves all owners"
    ),
    "zero_optimization.load_from_fp32_weights": no_effect("a checkpoint has one copy of a weight, the fp32 one"),
    "zero_optimization.elastic_checkpoint": no_effect("it names an old file format of DeepSpeed's"),
    "zero_optimization.grad_hooks": no_effect("gradients are always reduced from hooks"),
    "zero_optimization.round_robin_gradients": no_effect("every rank owns an equal part of each unit"),
    "zero_optimization.parameter_alignment": no_effect("every parameter begins at a multiple of 64 elements"),
    "zero_optimization.compute_grad_norm": no_effect(
        "the norm shows a gradient that is not finite, and is one number of each rank on the wire"
    ),
    "zero_optimization.ignore_unused_parameters": OBEYED,
    "zero_optimization.legacy_stage1": refused("stage 1 has one implementation; leave it out"),
    "zero_optimization.sub_group_size": no_effect(
        "one unit's shard is updated at a time, on the host in blocks, so there is no larger group to divide"
    ),
    "zero_optimization.stage3_prefetch_bucket_size": OBEYED,
    "zero_optimization.stage3_param_persistence_threshold": OBEYED,
    "zero_optimization.stage3_model_persistence_threshold": OBEYED,
    "zero_optimization.stage3_max_live_parameters": OBEYED,
    "zero_optimization.stage3_max_reuse_distance": OBEYED,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": no_effect(
        "save_16bit_model() writes whole weights at every stage"
    ),
    "zero_optimization.stage3_module_granularity_threshold": no_effect("units are found; `units` names more"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": no_effect("an all-gather always moves less"),
    "zero_optimization.stage3_allgather_sequential": no_effect("gathering fills the bucket in place, without a copy"),
    "zero_optimization.memory_efficient_linear": no_effect("PyTorch is not patched; no parameter is kept for backward"),
    "zero_optimization.override_module_apply": no_effect("`zero.Init` always sees each parameter while it is whole"),
    "zero_optimization.pipeline_loading_checkpoint": no_effect("each rank reads only its own ranges, block by block"),
    "zero_optimization.log_trace_cache_warnings": no_effect("a changed order of units is always counted"),
    "zero_optimization.enable_sanity_checks": OBEYED,
    "zero_optimization.zero_hpz_partition_size": OBEYED,
    "zero_optimization.zero_quantized_weights": not_built("quantized communication"),
    "zero_optimization.zero_quantized_nontrainable_weights": not_built("quantized weights"),
    "zero_optimization.zero_quantized_gradients": not_built("quantized communication"),
    "zero_optimization.mics_shard_size": OBEYED,
    "zero_optimization.mics_hierarchical_params_gather": not_built("hierarchical collectives"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": no_effect("momentum lies where all optimizer state lies"),
    "zero_optimization.leaf_module.**": OBEYED,
    f"{PAR}.**": OBEYED,
    f"{OPT}.device": OBEYED,
    f"{OPT}.nvme_path": OBEYED,
    f"{OPT}.pin_memory": OBEYED,
    f"{OPT}.ratio": OBEYED,
    f"{OPT}.super_offload": OBEYED,
    f"{OPT}.cpuadam_cores_perc": OBEYED,
    f"{OPT}.buffer_count": no_effect("three buckets' state is in memory: the last, this one, the next"),
    f"{OPT}.pipeline_read": no_effect("the next state is always read while this one is updated"),
    f"{OPT}.pipeline_write": no_effect("the last state is always written while this one is updated"),
    f"{OPT}.fast_init": no_effect("files are made by one call"),
    # optimizer and schedule
    "optimizer.type": OBEYED,
    "optimizer.params": OBEYED,
    "optimizer.legacy_fusion": refused("the step works on flat memory already; leave it out"),
    "scheduler.type": OBEYED,
    "scheduler.params": OBEYED,
    # precision
    "fp16.**": OBEYED,
    "bf16.**": OBEYED,
    "bf16.bf16_optimizer_states": no_effect("optimizer state has the format of the master weights"),
    "bf16.immediate_grad_update": not_built("updates inside the backward pass", switch="bf16.enabled"),
    "torch_autocast.**": OBEYED,
    "data_types.**": OBEYED,
    "precision.reduce_dtype": OBEYED,
    "precision.master_dtype": not_built("formats of master weights by key", harmless=("fp32",)),
    "precision.state_dtype": not_built("formats of optimizer state by key", harmless=("fp32",)),
    "precision.nonfinite": OBEYED,
    # the mesh, and parts of models on several ranks
    "parallel.dp_replicate": OBEYED,
    "parallel.dp_shard": OBEYED,
    "parallel.pp": not_built("pipeline", harmless=(1,)),
    "parallel.cp": not_built("sequence parallel", harmless=(1,)),
    "parallel.tp": not_built("tensor parallel", harmless=(1,)),
    "parallel.ep": not_built("expert parallel", harmless=(1,)),
    "activation_checkpointing.cpu_checkpointing": OBEYED,
    "activation_checkpointing.profile": OBEYED,
    "activation_checkpointing.modules": OBEYED,
    "activation_checkpointing.policy": OBEYED,
    "activation_checkpointing.partition_activations": no_effect(
        "there is one model-parallel rank: no other has the same activations"
    ),
    "activation_checkpointing.memory_budget": not_built("planner"),
    "activation_checkpointing.number_checkpoints": no_effect("nothing is reserved in advance"),
    "activation_checkpointing.contiguous_memory_optimization": no_effect("saved activations are left to the allocator"),
    "activation_checkpointing.synchronize_checkpoint_boundary": no_effect("the device's own order suffices"),
    "offload_activation.**": OBEYED,
    # watching
    "tensorboard.**": OBEYED,
    "csv_monitor.**": OBEYED,
    "wandb.**": OBEYED,
    "comet.**": OBEYED,
    "comms_logger.**": OBEYED,
    "flops_profiler.**": OBEYED,
    "timers.throughput.enabled": no_effect("speed is counted by the host's clock, at no cost"),
    "timers.throughput.synchronized": no_effect("the timer never makes the device wait"),
    # saving and reading
    "checkpoint.**": OBEYED,
    "checkpoint.use_node_local_storage": not_built("checkpoints on disks that nodes do not share"),
    "checkpoint.parallel_write.pipeline_stage": no_effect("all ranks write at the same time"),
    "checkpoint.writer.**": no_effect("there is one way of writing"),
    "checkpoint.save_on_signal": not_built("saving when the job is told to stop"),
    "checkpoint.checkpoint_serialization": no_effect("nothing is written by torch.save"),
    "checkpoint.writer.type": no_effect("there is one way of writing"),
    "aio.block_size": OBEYED,
    "aio.queue_depth": OBEYED,
    "aio.intra_op_parallelism": OBEYED,
    "aio.**": no_effect("reads and writes are page-aligned requests of a few threads"),
    # what to train on, and on how many ranks
    "elasticity.**": OBEYED,
    "elasticity.min_time": no_effect("when a job changes its number of ranks is its scheduler's business"),
    "elasticity.model_parallel_size": not_built("tensor parallel", harmless=(1,)),
    "curriculum_learning.**": OBEYED,
    "progressive_layer_drop.**": OBEYED,
    # smaller models, other engines
    # Shoal's own
    "compat": OBEYED,
    "strict": OBEYED,
    "units.**": OBEYED,
    "offload": OBEYED,
    "debug.**": not_built("debugging checks"),
    "debug.disk_sums": OBEYED,
    "data.stateful": OBEYED,
    "data.**": not_built("the seed of the data's order"),
    "data.seed": OBEYED,
}

# Of parts that are not built, keys that a stage below 3 has no use for: nothing is gathered there to be used.
AT_STAGE_3 = frozenset(
    {"zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_nontrainable_weights"}
)

# Types that are known and not built; every other type is the optimizer's business.
TYPES_NOT_BUILT: dict[str, str] = {
    "onebitadam": "1-bit optimizers",
    "zerooneadam": "1-bit optimizers",
    "onebitlamb": "1-bit optimizers",
    "muadam": "mu-parametrization",
    "muadamw": "mu-parametrization",
    "musgd": "mu-parametrization",
}

# Parameters of the optimizers whose support is not "obeyed".
PARAMS: dict[str, Support] = {
    "torch_adam": no_effect("the implementation is chosen by speed; all give the same numbers"),
    "fp32_optimizer_states": no_effect("optimizer state has the format of the master weights"),
    "set_grad_none": no_effect("gradients are always released after the step"),
    "comm_backend_name": no_effect("the mesh's own communicator is used"),
    "cuda_aware": no_effect("the mesh's own communicator is used"),
    "max_grad_norm": refused("gradients are clipped by the top-level key gradient_clipping"),
}


@cache
def support_of(path: str) -> Support:
    """The support of a key, by its path in the schema.

    Raises: KeyError: the table does not know it.
    """
    if path in SUPPORT:
        return SUPPORT[path]
    parts = path.replace("[]", "").split(".")
    for length in range(len(parts) - 1, 0, -1):
        rule = ".".join(parts[:length]) + ".**"
        if rule in SUPPORT:
            return SUPPORT[rule]
    raise KeyError(path)
