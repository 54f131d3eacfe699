"""This rank's pipeline stages of a model, and what of the optimizer belongs to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.build.plan import ModuleAsBuilt
from shoal.comm.protocol import Communicator
from shoal.comm.world import World
from shoal.config import Config
from shoal.config.parallel import Pipeline
from shoal.engine.earlier_split import SPLIT
from shoal.engine.model_parts import Specs
from shoal.engine.over_stages import from_stages
from shoal.engine.settings import Plan
from shoal.errors import ConfigError, NotBuiltError
from shoal.mesh import Mesh, tied_axis
from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
from shoal.pipeline.costs import partition_costs
from shoal.pipeline.cut import CutModel, Partition, cut
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.stage import StageModule
from shoal.pipeline.topology import topology_of_mesh
from shoal.running.parameter_owner import OWNERS
from shoal.running.sharded_at_init import ChunkedTransfer, ShardedAtInit
from shoal.sharding.axes import Axes
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.partition import names_a_unit
from shoal.sharding.parts import cut as cut_part


def stages_of(
    model: nn.Module, specs: Specs, config: Config, world: World, axes: Axes
) -> tuple[StageModule, Specs, Axes, Sequence[ModuleAsBuilt]]:
    """Cut a model into pipeline stages and keep this rank's; a ``StageModule`` is cut already.

    Returns: the stages; ``specs`` and ``axes`` with the axes along which stages have copies of weights, each with a
        summand of the gradient; the modules of the whole model, itself first, if a parameter came on the meta device.
    Raises: ConfigError: a model that is cut has other stages than the config asks for. ModelError: it cannot be cut.
    Communicates: control messages, where weights are tied over stages; what ``zero.Init`` has sharded, once.
    """
    mesh = axes.mesh
    sharded = {name: p for name, p in model.named_parameters() if isinstance(OWNERS.get(p), ShardedAtInit)}
    if config.progressive_layer_drop.enabled:
        raise NotBuiltError(
            "progressive_layer_drop of a model in pipeline stages: a stage runs from its first block to its last one,"
            " and each of them must be called in every forward.",
            do="disable the section, and let each block skip its own computation in its forward.",
            code="pipeline-layer-drop",
        )
    if config.precision.cast_forward_inputs or config.precision.output_dtype:
        raise NotBuiltError(
            "precision.cast_forward_inputs or precision.output_dtype of a model in pipeline stages, which each have a"
            " forward of their own.",
            do="leave them out, and cast in the first layer and in the loss function.",
            code="pipeline-casts",
        )
    section = config.pipeline
    num_micro = max(int(config.gradient_accumulation_steps), 1)
    virtual_stages = int(section.virtual_stages)
    is_cut = isinstance(model, StageModule) and not (isinstance(model, PipelineModule) and model.is_whole)
    if sharded and is_cut and mesh.pp > 1:
        raise NotBuiltError(
            f"a {type(model).__name__} of this rank's pipeline stages, built under zero.Init ({len(sharded)} parameters"
            " are sharded over ranks of all stages).",
            do="build it outside of zero.Init: each rank keeps its stages only; or build PipelineModule(layers) without"
            " num_stages and topology, and let the config cut it (pipeline.stages).",
            code="pipeline-init",
        )
    if isinstance(model, StageModule) and is_cut:
        virtual_stages = max(model.num_stages // mesh.pp, 1)
    schedule = build_schedule(section.schedule, mesh.pp, num_micro, virtual_stages=virtual_stages)
    own = schedule.stages_of(mesh.index("pp", world.rank))
    whole: list[ModuleAsBuilt] = []
    parameters: list[nn.Parameter] = []
    if not is_cut:
        parameters = list(model.parameters())
        if any(parameter.is_meta for parameter in parameters):
            whole = [ModuleAsBuilt.of(name, module) for name, module in model.named_modules()]
    if isinstance(model, PipelineModule):
        _follow_config(model, section)
        if model.is_whole:
            with _attention_of(axes):
                model.keep_stages(topology_of_mesh(mesh), schedule.stage_ranks, section.partition)
    elif section.seed_layers:
        raise NotBuiltError(
            f"pipeline.seed_layers = true of a {type(model).__name__}, whose modules exist already.",
            do="leave it out, or build a PipelineModule of LayerSpecs with seed_layers=True.",
            code="pipeline-seeds",
        )
    elif not isinstance(model, StageModule):
        split = None if isinstance(section.split_points, str) else section.split_points or None
        before = SPLIT.get(model)
        model = cut(
            model,
            schedule.num_stages,
            stages_of_rank=own,
            split_points=split,
            partition="uniform" if split else _partition(model, section, schedule.num_stages, world, axes),
            first_stage=section.first_stage,
            last_stage=section.last_stage,
            every_stage=section.every_stage,
        )
        if before is not None:
            SPLIT[model] = before
    if model.num_stages != schedule.num_stages or tuple(model.stages) != own:
        raise ConfigError(
            f"the model is cut into {model.num_stages} pipeline stages, of which this rank has {list(model.stages)};"
            f" the schedule {schedule.name} has {schedule.num_stages} over {mesh.pp} ranks, and this rank {list(own)}.",
            where=f"rank {world.rank}",
            do="give the model and the config the same number of stages (pipeline.stages, pipeline.virtual_stages).",
            code="pipeline-stages",
        )
    here = {id(parameter) for parameter in model.parameters()}
    if mesh.pp > 1:
        _shard_over_stage(sharded, here, specs, axes.data, world.device)
    OWNERS.put_elsewhere(parameter for parameter in parameters if id(parameter) not in here)
    own_parameters = dict(model.named_parameters())
    shared, comms = {}, {}
    for name, stages in sorted(model.tied.items()):
        ranks = sorted({schedule.stage_ranks[stage] for stage in stages})
        if len(ranks) > 1:
            axis = tied_axis(ranks)
            comm = world.communicator(axis, mesh)
            if name in own_parameters:
                comms[axis] = comm
                spec = specs.get(name) or ParameterSpec.whole(name, tuple(own_parameters[name].shape))
                shared[name] = replace(spec, summand_over=spec.summand_over | {axis})
    axes = replace(axes, comms={**axes.comms, **comms}, across=frozenset(comms))
    return model, {**specs, **shared}, axes, whole


def _shard_over_stage(
    sharded: Mapping[str, nn.Parameter], here: Collection[int], specs: Specs, comm: Communicator, device: Any
) -> None:
    """Give parameters that ``zero.Init`` has sharded over all ranks to the ranks of their pipeline stage.

    Args:
        sharded: of the whole model, in one order on every rank.
        here: ids of those of this rank's stages.
        comm: the ranks that hold the same stages.

    Communicates: an all-gather of each over all ranks, and a broadcast over ``comm``.
    Memory: one parameter.
    """
    owners: dict[ShardedAtInit, ShardedAtInit] = {}
    for name, parameter in sharded.items():
        owner = OWNERS.get(parameter)
        assert isinstance(owner, ShardedAtInit)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value = owner.whole(parameter)
            owner.give_up(parameter)
            if id(parameter) in here:
                part = specs.get(name)
                parameter.data = value if part is None else cut_part(value, part).contiguous()
                transfer = ChunkedTransfer(comm, device)
                owners.setdefault(owner, ShardedAtInit(transfer, shard_device=owner.shard_device)).shard(parameter)


def _follow_config(model: PipelineModule, section: Pipeline) -> None:
    """Let a module whose arguments leave it open recompute as the config says.

    Raises: ConfigError: the config asks for seeds of layers that were built without.
    """
    if section.seed_layers and not model.seed_layers:
        raise ConfigError(
            "pipeline.seed_layers = true, but the layers were built without seeds of their own.",
            do="pass seed_layers=True to PipelineModule, or leave the key out.",
            code="pipeline-seeds",
        )
    if not model.activation_checkpoint_interval:
        model.activation_checkpoint_interval = int(section.activation_checkpoint_interval)


def recomputed_blocks(model: nn.Module, config: Config) -> list[str]:
    """The blocks of a model that was cut that ``pipeline.activation_checkpoint_interval`` has recomputed one by one.

    Several blocks in one recomputation are run so by the model that was cut.
    """
    interval = int(config.pipeline.activation_checkpoint_interval)
    if not interval or not isinstance(model, CutModel):
        return []
    if interval > 1:
        model.activation_checkpoint_interval = interval
        return []
    return model.own_blocks


def _partition(
    model: nn.Module, section: Pipeline, num_stages: int, world: World, axes: Axes
) -> Partition | Sequence[float] | Sequence[Sequence[float]]:
    """What stages have as equal a share of.

    Raises: UsageError: there is no micro-batch to measure blocks with.
    Communicates: of measured blocks, what their passes do over tensor, sequence and context ranks, and rank 0's
        costs.
    """
    known: dict[str, Partition] = {"best": "best", "parameters": "parameters", "uniform": "uniform"}
    method = section.partition.casefold()
    if method in known:
        return known[method]
    is_measured = not method.startswith("type:")
    with _attention_of(axes):
        costs = partition_costs(
            model,
            section.partition,
            None,
            num_stages,
            world.device,
            virtual_stages=num_stages // axes.mesh.pp,
            checkpoint_interval=int(section.activation_checkpoint_interval),
            first_stage=section.first_stage,
            last_stage=section.last_stage,
            every_stage=section.every_stage,
        )
    if not is_measured:
        return costs
    comm = world.communicator("world", Mesh.of(world.size), max_ctas=0)
    found: Sequence[float] | Sequence[Sequence[float]] = comm.gather_objects(costs, label="costs of blocks")[0]
    return found


def _attention_of(axes: Axes) -> AbstractContextManager[None]:
    """Attention as the engine will compute it, for blocks and layers that are measured before there is one."""
    sp, cp = axes.get("sp"), axes.get("cp")
    return nullcontext() if sp is None and cp is None else sequence_parallel(SequenceContext(sp=sp, cp=cp))


def of_own_units(plan: Plan, model: StageModule, pp: Communicator | None) -> Plan:
    """The plan without names of units that other pipeline stages have. Communicates: the names that a stage has."""
    rules = plan.zero.rules
    each = [replace(rules, classes=(name,), names=()) for name in rules.classes]
    each += [replace(rules, classes=(), names=(name,)) for name in rules.names]
    here = [names_a_unit(model, rule) for rule in each]
    anywhere = [any(stages) for stages in zip(*from_stages(pp, here, "units"), strict=True)]
    kept = [rule for rule, is_here, is_known in zip(each, here, anywhere, strict=True) if is_here or not is_known]
    own = replace(
        rules,
        classes=tuple(name for rule in kept for name in rule.classes),
        names=tuple(name for rule in kept for name in rule.names),
    )
    return replace(plan, zero=replace(plan.zero, rules=own))
