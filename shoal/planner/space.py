"""The configurations that a plan chooses among: for each axis its values, and which of them go together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

from shoal.config import load
from shoal.config.parallel import INTERLEAVED
from shoal.errors import ShoalError, UsageError
from shoal.mesh import ORDER, Mesh, order_problem
from shoal.planner.facts import ModelFacts
from shoal.simulation.machines import GpuNode

# Powers of two; degrees are the ones of them that divide what they have to. A recomputation or an offload is tried
# where the values before it do not fit.
SPACE: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4, 8, 16),
    "virtual": (1, 2, 4),
    "schedule": ("1f1b", "zb_h1"),
    "tp": (1, 2, 4, 8),
    "sp": (1, 2, 4, 8),
    "cp": (1, 2, 4, 8),
    "ep": (1, 2, 4, 8, 16, 32, 64),
    "order": ("auto", "pp_inside", "cp_outside", "ep_outside"),
    "stage": (1, 2, 3),
    "shards": ("all", "node"),
    "micro": (1, 2, 4, 8, 16, 32),
    "recompute": ("none", "budget", "blocks"),
    "offload": ("none", "optimizer", "all"),
}
_ORDERS = {
    "auto": ORDER,
    "pp_inside": ("dp_replicate", "dp_shard", "cp", "pp", "sp", "tp"),
    "cp_outside": ("pp", "cp", "dp_replicate", "dp_shard", "sp", "tp"),
    "ep_outside": ("ep", *ORDER),
}


def order_name(mesh: Mesh) -> str:
    """The value of ``Candidate.order``."""
    return "auto" if mesh.order == ORDER else "-".join(mesh.order)


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Args:
        sequence: tokens of a row; ``global_batch``: rows of a step.
        base: the keys of the configuration that stay as they are.
        space: values in place of those of ``SPACE``, by axis.
    """

    num_ranks: int
    machine: GpuNode
    sequence: int
    global_batch: int
    base: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def values(self, axis: str) -> tuple[Any, ...]:
        """Of an axis, those that are tried."""
        return self.space.get(axis, SPACE[axis])


@dataclass(frozen=True)
class Candidate:
    """A configuration by its axes.

    Attributes: ``order``: of the axes: "auto", one that puts an axis inside of nodes or outside, or its axes, the
    outermost first: "cp-dp_shard-tp". ``virtual``: pipeline stages of a rank. ``schedule``: of one stage on a rank; of
    several always interleaved 1F1B. ``shards``: state is sharded over "all" data-parallel ranks or those of a "node".
    ``micro``: rows of a micro-batch. ``recompute``: "none", all "blocks", or as many as a memory "budget" needs, which
    is ``budget``, such as "12288MiB"; with it, one of each ``every`` blocks that would be recomputed has its
    activations offloaded, unless that is 0. ``offload``: "none", the "optimizer", or "all": parameters, too.
    ``gathered``: at stage 3, blocks before the last one that stay gathered from their forward to their backward.
    """

    pp: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    tp: int = 1
    sp: int = 1
    cp: int = 1
    ep: int = 1
    order: str = "auto"
    stage: int = 1
    shards: str = "all"
    micro: int = 1
    recompute: str = "none"
    budget: str = ""
    every: int = 0
    offload: str = "none"
    gathered: int = 0

    @property
    def model_ranks(self) -> int:
        """Ranks that see the same rows."""
        return self.pp * self.tp * self.sp * self.cp

    def num_micro(self, request: PlanRequest) -> int:
        """Micro-batches of a step; 0: the global batch does not divide."""
        dp = request.num_ranks // self.model_ranks
        return request.global_batch // (dp * self.micro) if request.global_batch % (dp * self.micro) == 0 else 0

    def mesh(self, request: PlanRequest) -> Mesh:
        """The ranks along each axis."""
        dp = request.num_ranks // self.model_ranks
        replicas = 1
        if self.shards == "node":
            replicas = dp // max(request.machine.gpus_per_node // (self.tp * self.sp * self.cp), 1)
        degrees = {axis: getattr(self, axis) for axis in ("pp", "tp", "sp", "cp", "ep")}
        order = _ORDERS.get(self.order) or self.order.split("-")
        return Mesh.of(request.num_ranks, dp_replicate=replicas, dp_shard=dp // replicas, order=order, **degrees)

    def config(self, request: PlanRequest, facts: ModelFacts) -> dict[str, Any]:
        """The file for ``shoal.initialize``."""
        mesh = self.mesh(request)
        made = copy.deepcopy(dict(request.base))
        made.pop("train_batch_size", None)
        made |= {"train_micro_batch_size_per_gpu": self.micro, "gradient_accumulation_steps": self.num_micro(request)}
        made.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}})
        if not {"fp16", "bf16", "fp8"} & set(made):
            made["bf16"] = {"enabled": True}
        zero = {**made.get("zero_optimization", {}), "stage": self.stage}
        for key, at in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
            if self.offload in at:
                zero[key] = {**zero.get(key, {}), "device": "cpu", "pin_memory": True}
        if self.gathered:
            block = facts.block.numel // self.tp + facts.block.expert_numel // self.ep
            zero["stage3_max_reuse_distance"] = 2 * self.gathered * block
            zero["stage3_max_live_parameters"] = (self.gathered + 3) * block + facts.outer.numel // self.tp
        made["zero_optimization"] = zero
        parallel = {axis: getattr(self, axis) for axis in ("pp", "tp", "sp", "cp", "ep") if getattr(self, axis) > 1}
        if mesh.dp_replicate > 1:
            parallel["dp_replicate"] = mesh.dp_replicate
        if self.tp > 1:
            parallel |= {"tp_sequence_parallel": True, "tp_loss_parallel": True}
        if mesh.order != ORDER:
            parallel["order"] = list(mesh.order)
        if parallel:
            made["parallel"] = {**parallel, **made.get("parallel", {})}
        if self.pp > 1:
            schedule = self.schedule if self.virtual == 1 else INTERLEAVED[self.schedule]
            made["pipeline"] = {"schedule": schedule, "virtual_stages": self.virtual, "partition": "uniform"}
        if self.recompute != "none":
            section = {**made.get("activation_checkpointing", {}), "modules": [facts.block_class]}
            more = {"memory_budget": self.budget, "offload_every": self.every}
            made["activation_checkpointing"] = section | {key: value for key, value in more.items() if value}
        return made

    def __str__(self) -> str:
        default = asdict(Candidate(pp=0, tp=0, stage=0, micro=0))
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != default[name])


def candidates(request: PlanRequest, facts: ModelFacts) -> Iterator[tuple[Candidate, str]]:
    """Every combination but those of recomputation and offload, and why it is impossible; "": it is possible."""
    axes = [
        each.name
        for each in fields(Candidate)
        if each.name not in ("recompute", "budget", "every", "offload", "gathered")
    ]
    degrees = ("pp", "virtual", "schedule", "tp", "sp", "cp", "ep")
    for values in product(*(request.values(axis) for axis in degrees)):
        whole = Candidate(**dict(zip(degrees, values, strict=True)))
        if why := _degrees_problem(whole, request, facts):
            yield whole, why
            continue
        for order in request.values("order"):
            if why := _order_problem(whole, order, request):
                if "order" in request.space:
                    yield replace(whole, order=order), why
                continue
            for rest in product(*(request.values(axis) for axis in axes if axis not in (*degrees, "order"))):
                one = replace(whole, order=order, **dict(zip(("stage", "shards", "micro"), rest, strict=True)))
                yield one, _problem(one, request)


def with_savings(possible: Candidate, request: PlanRequest) -> Iterator[Candidate]:
    """The candidate with each offload and recomputation, the ones that cost least time first. A budget is not set."""
    for offload, recompute in product(request.values("offload"), request.values("recompute")):
        if recompute == "budget" and possible.pp > 1:  # which the engine refuses
            continue
        if not (offload == "all" and possible.stage != 3) and not (offload != "none" and possible.stage == 0):
            yield replace(possible, recompute=recompute, offload=offload)


def _degrees_problem(one: Candidate, request: PlanRequest, facts: ModelFacts) -> str:
    node, stages = request.machine.gpus_per_node, one.pp * one.virtual
    parts = one.tp * one.sp * one.cp
    if request.num_ranks % one.model_ranks:
        return f"{one.model_ranks} model-parallel ranks do not divide {request.num_ranks} ranks"
    if one.virtual > 1 and one.pp == 1:
        return "virtual stages need pipeline stages"
    if one.schedule != "1f1b" and (one.pp == 1 or one.virtual > 1):
        return f"{one.schedule} needs pipeline stages, one on a rank"
    if one.tp * one.sp > node and "tp" not in request.space:
        return f"tp x sp = {one.tp * one.sp} exceeds the {node} GPUs of a node"
    if facts.num_blocks % (stages * facts.period) or (stages > 1 and facts.prefix):
        return f"{stages} pipeline stages do not divide {facts.num_blocks} equal blocks"
    if facts.divisible["heads"] % (one.tp * one.sp):
        return f"tp x sp = {one.tp * one.sp} does not divide {facts.divisible['heads']} heads"
    if request.sequence % parts:
        return f"tp x sp x cp = {parts} does not divide {request.sequence} tokens"
    if one.ep > 1 and facts.divisible.get("experts", 1) % one.ep:
        return f"ep = {one.ep} does not divide {facts.divisible.get('experts', 1)} experts"
    return ""


def _order_problem(one: Candidate, order: str, request: PlanRequest) -> str:
    """Why an order of the axes is not tried: all but the first one of ``SPACE`` matter on several nodes only."""
    node, dp = request.machine.gpus_per_node, request.num_ranks // one.model_ranks
    matters = {
        "pp_inside": one.pp > 1 and dp * one.cp > 1 and one.pp * one.sp * one.tp <= node,
        "cp_outside": one.cp > 1 and dp > 1,
        "ep_outside": one.ep > 1 and dp * one.cp * one.sp * one.tp > one.ep,
    }
    if order in matters and not (matters[order] and request.num_ranks > node):
        return f"the order {order} changes nothing"
    degrees = {axis: getattr(one, axis) for axis in ("pp", "cp", "sp", "tp")} | {"dp_shard": dp}
    problem = order_problem(_ORDERS.get(order) or order.split("-"), degrees)
    return "" if problem is None else f"the order of the axes is {problem[0]}"


def _problem(one: Candidate, request: PlanRequest) -> str:
    dp, num_micro = request.num_ranks // one.model_ranks, one.num_micro(request)
    if not num_micro:
        return f"{dp} data-parallel ranks x {one.micro} rows do not divide the global batch of {request.global_batch}"
    if one.pp > 1 and (num_micro < one.pp or (one.virtual > 1 and num_micro % one.pp)):
        return f"{num_micro} micro-batches are too few for, or not a multiple of, {one.pp} pipeline stages"
    if one.pp > 1 and one.stage == 3 and "stage" not in request.space:
        return "stage 3 in pipeline stages is tried with --space stage=3 only: its dry run takes minutes"
    per_node = request.machine.gpus_per_node // (one.tp * one.sp * one.cp)
    if one.shards == "node" and one.order != "auto":
        return "the shards of a node with another order of the axes are not tried"
    if one.shards == "node" and (per_node < 2 or dp % per_node or dp == per_node):
        return "the shards of a node are all shards, or none"
    if (one.ep > 1 and (dp * one.sp * one.cp * one.tp) % one.ep) or (one.ep > 1 and one.shards == "node"):
        return f"ep = {one.ep} does not divide the ranks that share an expert's copy"
    return ""


def refused(config: Mapping[str, Any], num_ranks: int) -> str:
    """Why the engine refuses a configuration when it is loaded; "": it does not."""
    try:
        load(dict(config), world_size=num_ranks, warns=False)
    except ShoalError as error:
        return str(error).splitlines()[0]
    return ""


def parse_filter(text: str) -> dict[str, Any]:
    """The axes and values of a text such as "tp=4 micro=2".

    Raises: UsageError: it names no axis, or a value that the axis does not have.
    """
    wanted: dict[str, Any] = {}
    for each in text.replace(",", " ").split():
        axis, _, value = each.partition("=")
        known = {str(at): at for at in SPACE.get(axis, ())}
        if axis == "order" and order_problem(value.split("-"), {}) is None:
            known[value] = value
        if axis not in SPACE or (value not in known and not value.isdecimal()):
            raise UsageError(
                f"{each!r} is no value of the search.",
                do="write axis=value, such as tp=4; axes and values are "
                + "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in SPACE.items())
                + ".",
                code="plan-explain",
            )
        wanted[axis] = known.get(value, int(value) if value.isdecimal() else value)
    return wanted
