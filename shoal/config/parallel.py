"""The sections of parallelism: the axes of the mesh, tensor-parallel layers, pipeline stages, experts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.config.base import Auto, Section, key, section
from shoal.config.problems import Problem
from shoal.config.tables import with_unsupported
from shoal.mesh import Axis
from shoal.text import did_you_mean

Degree = Annotated[int, Field(ge=1)] | Auto


class Parallel(Section):
    """The mesh: how many ranks along each axis. Shoal's own."""

    pp: Degree = key("auto", "pipeline stages")
    dp_replicate: Degree = key("auto", "groups of ranks that each store all shards")
    dp_shard: Degree = key("auto", "data-parallel ranks of one group, over which state is sharded")
    cp: Degree = key("auto", "context-parallel ranks: parts of a sequence, with ring attention")
    sp: Degree = key("auto", "sequence-parallel ranks: parts of a sequence, with Ulysses' all-to-all over heads")
    tp: Degree = key("auto", "tensor-parallel ranks: parts of each layer")
    ep: Degree = key("auto", "expert-parallel ranks")
    order: tuple[str, ...] | Auto = key(
        "auto",
        "names of the axes of more than one rank, the outermost first; those at the end are inside a node; auto: pp, "
        "dp_replicate, dp_shard, cp, sp, tp. Experts are divided among neighbours; with `ep` before dp_shard, cp and "
        "sp, among ranks that are far apart",
    )
    tp_plan: dict[str, str] | Auto = key(
        "auto", "how modules are split, by name with wildcards (`column`, `row` ...); auto: the model's own plan"
    )
    tp_grid: Literal["1d", "2d", "2.5d", "3d"] = key(
        "1d",
        "how layers are split over the tensor-parallel ranks: along one dim (1d), or over a grid of q x q (2d), "
        "q x q x d (2.5d) or q x q x q ranks (3d)",
    )
    tp_sequence_parallel: bool = key(
        False, "between split layers, each tensor-parallel rank holds a part of the sequence (Megatron's)"
    )
    tp_loss_parallel: bool = key(
        False, "compute the loss from split logits, which no rank holds whole; the model returns this rank's part"
    )
    max_ctas: dict[Axis, Annotated[int, Field(ge=1)]] = key(
        {},
        "the most channels that NCCL opens for the ranks along an axis, by its name: each takes device memory and "
        "a multiprocessor; other axes: NCCL decides",
    )


class LayerRule(Section):
    """A rule for the layers whose names match."""

    patterns: tuple[str, ...] = key((), "regular expressions over parameter names")
    partition_type: Literal["row", "column", "skip"] = key("column", "split the rows, the columns, or nothing")
    shape: tuple[Any, ...] | None = key(None, "the parts of a fused weight (query, key and value; gate and up)")
    partition_dim: int | None = key(None, "the dimension of `shape` that is split")
    model_types: tuple[str, ...] | None = key(None, "Hugging Face model types for which the rule holds; null: all")
    gather_output: bool = key(False, "gather the output of a column split")
    grad_allreduce: bool = key(False, "sum the gradient of a parameter that every rank holds")


class PartitionConfig(Section):
    """Rules for splitting layers."""

    use_default_specs: bool = key(True, "also use the built-in rules")
    layer_specs: tuple[LayerRule, ...] = key((), "the rules")
    strict_mode: bool = key(True, "raise an error for a linear layer that no rule matches")


@with_unsupported("tensor_parallel.tp")
class TpDegree(Section):
    """The same degree, as in DeepSpeed's inference config."""

    tp_size: int = key(1, "tensor-parallel ranks", ge=1)


@with_unsupported("tensor_parallel")
class TensorParallel(Section):
    """Layers split over ranks (AutoTP)."""

    autotp_size: int = key(0, "tensor-parallel ranks; 0 is off", ge=0)
    tp_overlap_comm: bool | Literal["symmetric_memory"] | Auto = key(
        "auto",
        "overlap sums over ranks with computation; auto: on accelerators, chunks of 8 MiB and more (with "
        "tp_sequence_parallel: large products, a part of each rank at a time, if the ranks are on one node), unless "
        "blocks are compiled or activations encoded (wire.tensor); symmetric_memory: as true, with "
        "tp_sequence_parallel and NCCL by torch's products over symmetric memory",
    )
    partition_config: PartitionConfig | None = key(None, "rules for splitting layers")
    tp: TpDegree = section(TpDegree, "the same degree, as in the inference config")


# By name, the pipeline stages that one rank may have; 0: any number.
SCHEDULES = {
    "gpipe": 0,
    "1f1b": 1,
    "interleaved_1f1b": 0,
    "interleaved_zero_bubble": 0,
    "zb_h1": 1,
    "zbv": 2,
    "dualpipev": 2,
}
INTERLEAVED = {"1f1b": "interleaved_1f1b", "zb_h1": "interleaved_zero_bubble"}
PARTITIONS = ("best", "parameters", "uniform", "memory", "time")


@with_unsupported("pipeline")
class Pipeline(Section):
    """A model cut into pipeline stages. `parallel.pp` gives the ranks as well."""

    stages: Degree = key("auto", "pipeline-parallel ranks; auto: parallel.pp")
    virtual_stages: int = key(1, "pipeline stages of one rank; zbv and dualpipev always have 2", ge=1)
    partition: str = key(
        "best", "how layers are divided: best (by parameters), parameters, uniform, memory, time, or type:REGEX"
    )
    split_points: tuple[str, ...] | Auto = key(
        "auto", "names of the modules that begin the second stage and those after it; auto: by partition"
    )
    first_stage: tuple[str, ...] = key((), "names of modules outside the blocks that the first stage calls")
    last_stage: tuple[str, ...] = key((), "names of modules outside the blocks that the last stage calls")
    every_stage: tuple[str, ...] = key((), "names of modules outside the blocks that every stage calls")
    schedule: str = key(
        "1f1b", f"order of the micro-batches' work: {', '.join(SCHEDULES)}, or the path of a file with one line a rank"
    )
    seed_layers: bool = key(False, "give each layer a seed of its own")
    activation_checkpoint_interval: int = key(
        0, "recompute activations in segments of this many layers; 0: never", ge=0
    )


def schedule_name(text: str) -> str | None:
    """The name in ``SCHEDULES`` that a text means, in any case, with - or _ or neither; None: a path.

    >>> schedule_name("Interleaved1F1B"), schedule_name("zero_bubble"), schedule_name("ZB-H1"), schedule_name("a.txt")
    ('interleaved_1f1b', 'interleaved_zero_bubble', 'zb_h1', None)
    """
    plain = text.casefold().replace("-", "").replace("_", "")
    plain = {"zerobubble": "interleavedzerobubble", "zbvzerobubble": "zbv"}.get(plain, plain)
    return {name.replace("_", ""): name for name in SCHEDULES}.get(plain)


def virtual_stages_problem(schedule: str, virtual_stages: int) -> tuple[str, str] | None:
    """Why a schedule of ``SCHEDULES`` cannot have so many stages on a rank, and what to do; None: it can.

    ``virtual_stages`` is 1 where the config has no such key, so schedules that always have two accept 1.
    """
    allowed = SCHEDULES[schedule]
    if not allowed or virtual_stages in (1, allowed):
        return None
    what = f"{allowed} pipeline stage{'s' * (allowed > 1)} a rank, and virtual_stages is {virtual_stages}"
    other = f", or use the schedule {INTERLEAVED[schedule]}" if schedule in INTERLEAVED else ""
    return what, f"set virtual_stages to {allowed}{other}."


def pipeline_problems(pipeline: Pipeline) -> Iterator[Problem]:
    """What the keys of the section allow one by one, and not together."""
    name = schedule_name(pipeline.schedule)
    if name is not None:
        problem = virtual_stages_problem(name, pipeline.virtual_stages)
        if problem:
            yield Problem("pipeline.virtual_stages", f"{name} has {problem[0]}.", problem[1], code="pipeline-schedule")
    elif not os.path.isfile(pipeline.schedule):  # pathlib raises where a name is too long
        hint = did_you_mean(pipeline.schedule, SCHEDULES) or "."
        what = f'"{pipeline.schedule}" is neither a schedule nor a file{hint}'
        do = f"write one of {', '.join(SCHEDULES)}, or the path of a file with one line a rank."
        yield Problem("pipeline.schedule", what, do, code="pipeline-schedule")
    kind, _, pattern = pipeline.partition.partition(":")
    if kind.casefold() == "type" and pattern:
        if error := _regex_error(pattern):
            what = f'"{pipeline.partition}": {pattern!r} is not a regular expression: {error}.'
            yield Problem("pipeline.partition", what, "correct the expression after type:.")
    elif pipeline.partition.casefold() not in PARTITIONS:
        hint = did_you_mean(pipeline.partition, PARTITIONS) or "."
        what = f'"{pipeline.partition}" is not a way to divide layers{hint}'
        do = f"write one of {', '.join(PARTITIONS)}, or type:REGEX, such as type:Block."
        yield Problem("pipeline.partition", what, do)
    if pipeline.split_points != "auto" and isinstance(pipeline.stages, int) and name is not None:
        num_stages = pipeline.stages * (SCHEDULES[name] or pipeline.virtual_stages)
        if len(pipeline.split_points) != num_stages - 1:
            what = f"{len(pipeline.split_points)} modules, and {num_stages} pipeline stages have {num_stages - 1}"
            yield Problem(
                "pipeline.split_points", f"{what} boundaries.", "name the first module of each stage but the first."
            )


PRESETS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "minimax_m3",
    "llama4", "dbrx",
)  # fmt: skip


@with_unsupported("expert_parallel")
class ExpertParallel(Section):
    """Experts divided among ranks (AutoEP). `parallel.ep` gives the ranks as well, and enables the section."""

    enabled: bool = key(False, "divide the experts of the model's mixture-of-experts layers among ranks")
    autoep_size: int = key(1, "expert-parallel ranks", ge=1)
    expert_tensor_parallel_size: int = key(
        1, "tensor-parallel ranks over which each expert is split; a divisor of their number", ge=1
    )
    preset_model: str | None = key(
        None, f"names of a model family's layers: {', '.join(PRESETS)}; null: found from the model"
    )
    moe_layer_pattern: str | None = key(
        None, "regular expression for the end of a module's name: the mixture-of-experts layers; null: by preset"
    )
    router_pattern: str | None = key(None, "attribute that holds the router, or a regular expression over its name")
    expert_pattern: str | None = key(None, "attribute that holds the experts, or a regular expression over its name")
    expert_w1: str | None = key(None, "name of an expert's first weight (gate)")
    expert_w2: str | None = key(None, "name of an expert's second weight (down)")
    expert_w3: str | Auto | None = key(
        "auto", "name of an expert's third weight (up); null: gate and up are one weight; auto: by preset"
    )
    num_experts_attr: str | None = key(None, "attribute of the model's config: number of experts")
    top_k_attr: str | None = key(None, "attribute of the model's config: experts for each token")
    has_shared_experts: bool | None = key(None, "some experts compute every token; null: by preset")
    shared_experts_pattern: str | None = key(None, "attribute that holds the shared experts")
    shared_experts_gate_pattern: str | None = key(None, "attribute that holds the gate of the shared experts")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "function from the router's output to scores")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "weight tokens before or after the experts")
    route_norm: bool | None = key(None, "scale the chosen scores to a sum of 1; null: by preset")
    route_scale: float = key(1.0, "factor on the scores", allow_inf_nan=False)
    routed_scaling_factor: float | Auto = key("auto", "factor on the experts' output; auto: the model's own")
    top_k: int | Auto = key("auto", "experts for each token; auto: the model's own")
    num_expert_groups: int | None = key(None, "groups of experts that the router chooses among", ge=1)
    num_limited_groups: int | None = key(None, "groups of experts that one token may use", ge=1)
    load_balance_coeff: float | None = key(
        None, "step of the bias that balances the load without a loss; null: none", ge=0, allow_inf_nan=False
    )
    overlap: int = key(
        1, "chunks of the tokens: one is communicated while another is computed; 1: none (Shoal's own key)", ge=1
    )
    ranks_per_node: Degree = key(
        "auto",
        "expert-parallel ranks of one node: on several nodes, rows are sent within a node first, then once between"
        " nodes; auto: by host name (Shoal's own key)",
    )
    rebalance_every: int = key(
        0, "steps between two moves of experts among ranks, by measured load; 0: never (Shoal's own key)", ge=0
    )
    hot_experts: int = key(
        0,
        "experts of each layer, the most loaded ones, that every rank may have a copy of; chosen each"
        " `rebalance_every` steps (Shoal's own key)",
        ge=0,
    )
    gather_if_used: bool = key(
        False,
        "with `offload_param`: read and gather only experts that some token uses (Shoal's own key)",
    )


def expert_problems(experts: ExpertParallel) -> Iterator[Problem]:
    """What the keys of the section allow one by one, and not together."""
    if experts.preset_model is not None and experts.preset_model not in PRESETS:
        what = f'"{experts.preset_model}" is not a preset{did_you_mean(experts.preset_model, PRESETS) or "."}'
        do = f"write one of {', '.join(PRESETS)}, or leave it out and name the layers by patterns."
        yield Problem("expert_parallel.preset_model", what, do)
    for name in ("moe_layer_pattern", "router_pattern", "expert_pattern", "shared_experts_pattern"):
        pattern = getattr(experts, name)
        if error := _regex_error(pattern or ""):
            what = f'"{pattern}" is not a regular expression: {error}.'
            yield Problem(f"expert_parallel.{name}", what, "correct the expression.")
    if experts.gather_if_used and experts.hot_experts:
        what = f"true, and hot_experts is {experts.hot_experts}: copies are made of experts that are gathered."
        yield Problem("expert_parallel.gather_if_used", what, "leave out one of the two.")
    groups, limited = experts.num_expert_groups, experts.num_limited_groups
    if (groups is None) != (limited is None) or (groups is not None and limited is not None and limited > groups):
        what = f"{groups}, and num_limited_groups is {limited}: a token uses some of the groups."
        do = "set both, with at most as many limited groups as groups, or neither."
        yield Problem("expert_parallel.num_expert_groups", what, do)
    if experts.has_shared_experts and not (experts.shared_experts_pattern or experts.preset_model):
        what = "true, and neither shared_experts_pattern nor preset_model names them."
        yield Problem("expert_parallel.has_shared_experts", what, "name the attribute in shared_experts_pattern.")


def _regex_error(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return ""
