"""The axes of a mesh, and what each parameter of a model is along those of tensor and expert parallelism.

    parameter                                     split over     others over   summand over   copies over
    of a layer that is split                      tp
    whole, inside of split activations            -              -             tp
    whole                                         -              -             -              tp
    of experts that are not divided, where each expert is split over a part of tp (etp)
      split                                       etp            -             (tp_fold)      tp_fold
      whole, of tokens split over tp_fold         -              -             tp_fold        etp
    of divided experts, stacked                   ep             -             -              etp
      split, too                                  expert_model
    of divided experts, in a list                 -              ep            -              etp
      split, too                                  etp            ep

Weights that pipeline stages share are added in ``stages_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from shoal.build.settings import WireSettings
from shoal.comm.encoded import encoded
from shoal.comm.formats import WireFormat
from shoal.comm.parts import PartsCommunicator
from shoal.comm.protocol import Communicator
from shoal.comm.two_level import TwoLevels
from shoal.comm.world import current_world
from shoal.config import Config
from shoal.config.parallel import PartitionConfig
from shoal.device import Device
from shoal.engine.earlier_split import SPLIT, Split, how_split
from shoal.engine.generators import share_generator_states
from shoal.engine.over_stages import from_stages
from shoal.errors import ConfigError, ModelError
from shoal.mesh import Axis as MeshAxis
from shoal.mesh import Mesh, factor_axis
from shoal.parallel.expert.divide import complete_plan, divide, split_stacks, without_experts
from shoal.parallel.expert.held import ExpertsHeld, TensorRanks, modules_with_experts
from shoal.parallel.tensor.apply import parallelize
from shoal.parallel.tensor.grid import Grid
from shoal.parallel.tensor.grid_apply import parallelize_grid
from shoal.parallel.tensor.overlap import LEAST_NBYTES
from shoal.parallel.tensor.plan import plan_for
from shoal.pipeline.cut import CUT_MODELS
from shoal.process import node
from shoal.running.parameter_owner import OWNERS
from shoal.sharding.axes import Axes, DataAxes
from shoal.sharding.layout import ParameterSpec
from shoal.streams import is_accelerator
from shoal.text import listed

Specs = dict[str, ParameterSpec]  # by name in this rank's model


def axes_of(
    mesh: Mesh,
    open_axis: Callable[..., Communicator],
    secondary_size: int | None = None,
    *,
    are_replicas_apart: bool = False,
) -> Axes:
    """The communicators of a mesh.

    Args:
        open_axis: the communicator along an axis, with ``max_ctas`` and ``number`` of ``World.communicator``.
        secondary_size: the ranks of a second sharding; None: there is none.
        are_replicas_apart: each replica takes steps of its own.
    """
    # Where two axes are the same ranks, one communicator serves both, so that its calls have one order.
    shard = "dp_shard" if mesh.fsdp == mesh.dp_shard else "fsdp"
    batch = open_axis("dp") if mesh.size("loss") == mesh.dp else open_axis("dp", max_ctas=0)
    data = batch if mesh.size("loss") == mesh.dp else open_axis("loss")
    comms = {
        "world": data if mesh.world_size == data.size else open_axis("world", max_ctas=1),
        "batch": batch,
        "loss": data,
        shard: data if mesh.fsdp == data.size else open_axis(shard),
    }
    for axis in ("dp_replicate", "tp", "sp", "cp", "pp", "ep"):
        if mesh.size(axis) > 1:
            comms[axis] = open_axis(axis)
    if mesh.pp > 1:  # a send never waits for a receive of the other direction
        comms["pp_gradients"] = open_axis("pp", number=1)
    for axis, other in (("tp_fold", mesh.etp), ("etp", mesh.tp_fold)):
        if mesh.size(axis) > 1:
            comms[axis] = comms["tp"] if other == 1 else open_axis(axis)
    left = {}
    if mesh.ep > 1:
        comms["expert_dp"] = open_axis("expert_dp")
        comms["expert_data"] = comms["expert_dp"] if mesh.dp_replicate == 1 else open_axis("expert_data")
        left = dict.fromkeys(("ep", "expert_model"), DataAxes("expert_dp", "expert_data"))
        if mesh.etp > 1:
            comms["expert_model"] = open_axis("expert_model")
    if mesh.pp > 1:
        is_data_only = mesh.world_size == data.size * mesh.pp
        comms["pipeline_stage"] = data if is_data_only else open_axis("pipeline_stage")
    if secondary_size is not None:
        sizes = mesh.fsdp // secondary_size, secondary_size
        comms["second"] = open_axis(factor_axis("fsdp", sizes, (1,)))
    return Axes(
        mesh,
        comms,
        DataAxes(shard, "loss"),
        left,
        units="pipeline_stage" if mesh.pp > 1 else "world",
        names="pp" if mesh.pp > 1 else None,
        of_activations=frozenset({"batch", "sp", "cp", "pp", "pp_gradients"}),
        apart="dp_replicate" if are_replicas_apart else None,
    )


def check_split(model: nn.Module, axes: Axes, config: Config, wire: WireFormat | None) -> None:
    """Raises: ModelError: an engine that had the model before has split it in another way, or cut it into stages."""
    if model in CUT_MODELS:
        raise ModelError(
            f"an earlier engine has cut this {type(model).__name__} into pipeline stages: it has those of this rank.",
            do="give initialize() the module of that engine (engine.module), or build the model again.",
            code="model-split",
        )
    before = SPLIT.get(model)
    is_same = before is not None and before.how == how_split(axes, config, wire)
    if is_same or any(map(_is_declared, model.parameters())):
        return
    split = [name for name, module in model.named_modules() if hasattr(module, "tensor_split")]
    if split:
        raise ModelError(
            f"{len(split)} layers of {type(model).__name__} are split over tensor-parallel ranks already:"
            f" {listed(split, 4)}. An earlier engine of this model has split them in another way than this one would.",
            do="build the model again and load its checkpoint, which any layout loads; or leave the sections parallel,"
            " tensor_parallel and wire.tensor, and the ranks, as they were.",
            code="model-split",
        )


def parts_of(
    model: nn.Module, axes: Axes, config: Config, device: torch.device, wire: WireFormat | None = None
) -> Specs:
    """What this rank holds of the model, on a tensor-parallel axis. A model that is whole is split.

    Raises: ModelError: the plan does not fit the model, or the model cannot be split as it is.
    Communicates: on a tensor-parallel axis: a broadcast of what is not split yet.
    """
    comm, etp = axes.get("tp"), axes.get("etp")
    if comm is None:
        return {}
    before = SPLIT.get(model)
    parts, partial = declared_parts(model, comm) if before is None else (dict(before.parts), before.partial)
    owners = {name: OWNERS.get(parameter) for name, parameter in model.named_parameters()}
    lost = [name for name, o in owners.items() if o is not None and (name in parts or o.comm.size < axes.world.size)]
    if lost:
        raise ModelError(
            f"{len(lost)} parameters that are sharded are parts of larger tensors already: {', '.join(lost[:4])}"
            f"{' ...' if len(lost) > 4 else ''}.",
            where=f"{comm.size} tensor-parallel ranks",
            do="hand over a model that zero.Init has sharded whole, over all ranks; initialize() splits it.",
            code="tensor-parallel-init",
        )
    synchronize_whole(model, parts, comm, device, etp)
    if before is not None:
        return _along_tp(model, axes, parts, partial)
    if etp is not None and etp is not comm:
        _check_declared(model, parts, etp)
    is_whole = not parts
    if is_whole:
        parts, partial = split(model, axes, config, device, wire)
    elif wire is not None:
        raise ConfigError(
            f'wire.tensor is "{wire.name}", and the model was split before initialize().',
            do="give the format to parallelize(..., wire=...), and leave wire.tensor out.",
            code="wire-tensor",
        )
    if etp is not None:
        parts |= split_stacks(model, etp)
    if is_whole:
        SPLIT[model] = Split(how_split(axes, config, wire), parts, partial)
    return _along_tp(model, axes, parts, partial)


def _along_tp(model: nn.Module, axes: Axes, parts: Mapping[str, ParameterSpec], partial: Collection[str]) -> Specs:
    """The parameters along the tensor-parallel axes.

    Args:
        parts: those that are split, by name.
        partial: names of those of whose gradient each rank has a summand.
    """
    tp, etp, fold = frozenset({"tp"}), frozenset({"etp"}), frozenset({"tp_fold"})
    of_experts = {name for name, _ in _parameters_of_experts(model)} if _is_folded(axes) else set()
    specs = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a later stage may have the second name
        spec = parts.get(name) or ParameterSpec.whole(name, tuple(parameter.shape))
        if name in parts:
            spec = replace(spec, split_over=etp if name in of_experts else tp)
        if name in partial and (name not in parts or name in of_experts):
            spec = replace(spec, summand_over=fold if name in of_experts else tp)
        named = spec.split_over | spec.summand_over
        specs[name] = replace(spec, copies_over=(tp if named <= tp else etp | fold) - named)
    return specs


def _is_folded(axes: Axes) -> bool:
    """True if each expert is split over a part of the tensor-parallel ranks."""
    return 1 < axes.mesh.etp < axes.mesh.tp


def with_experts(
    model: nn.Module,
    specs: Specs,
    axes: Axes,
    config: Config,
    hosts: Sequence[str],
    wire: WireFormat | None = None,
) -> tuple[Specs, Axes]:
    """Divide the experts of a model among the expert-parallel ranks.

    Args:
        hosts: of each rank.
        wire: the format in which tokens are sent to experts and back.

    Returns: ``specs`` with those of the experts; the axes, with the ranks that hold parameters of other names.
    Raises: ModelError, ConfigError: the model has no experts to divide, or they do not fit the ranks.
    Communicates: as ``divide``; over pipeline stages, whether experts are in lists.
    """
    if axes.get("ep") is None and not any(True for _ in modules_with_experts(model)):
        return specs, axes
    mesh = axes.mesh
    tokens = tuple(mesh.ranks_along("tp_fold", rank)[0] for rank in mesh.ranks_along("ep", current_world().rank))
    divided = divide(model, axes.get("ep"), axes.get("tp_fold"), axes.get("pp"), specs, tokens)
    split = [name for name in divided if name in specs and specs[name].split_over]
    if split and axes.mesh.etp == 1:
        raise ModelError(
            f"{split[0]} is of one expert, and is split over {axes.mesh.tp} tensor-parallel ranks,"
            " which take different tokens to the experts.",
            do="set expert_parallel.expert_tensor_parallel_size to the number of these ranks, or leave experts whole.",
            code="tensor-parallel-plan",
        )
    etp = {"etp" if _is_folded(axes) else "tp"} if axes.mesh.etp > 1 else set()
    for name, held in _parameters_of_experts(model):
        if name in divided:
            is_split, is_listed = name in split, held.form == "listed"
            within = etp if is_split else set()
            divided[name] = replace(
                divided[name],
                split_over=frozenset(within if is_listed else {"expert_model"} if is_split else {"ep"}),
                others_over=frozenset({"ep"} if is_listed else ()),
                summand_over=specs[name].summand_over & axes.across if name in specs else frozenset(),
                copies_over=frozenset(etp - within),
            )
    hierarchy = None
    if axes.get("ep") is not None:  # what follows is the same on pipeline stages that have no experts
        has_lists = any(held.form == "listed" and held.ep_size > 1 for _, _, held in modules_with_experts(model))
        if any(from_stages(axes.get("pp"), has_lists, "stages with lists of experts")):
            axes = replace(axes, names="world")
        hierarchy = _levels(axes.mesh, "ep", config.expert_parallel.ranks_per_node, hosts, code="expert-parallel-size")
    for _, _, held in modules_with_experts(model):
        held.hierarchy = hierarchy if held.ep_size > 1 else None
        held.wire = wire
    return {**specs, **divided}, axes


def _parameters_of_experts(model: nn.Module) -> Iterator[tuple[str, ExpertsHeld]]:
    """By name, in this rank's model."""
    for prefix, module, held in modules_with_experts(model):
        for name, _ in module.named_parameters():
            yield f"{prefix}.{name}", held


def levels_of(axes: Axes, wire: WireSettings, hosts: Sequence[str], *, is_sharded: bool) -> dict[str, TwoLevels]:
    """The axis that shards dense parameters in two levels, by its name in the rows, where the configuration asks so.

    Args:
        hosts: of each rank.
        is_sharded: False: at stage 0, where it is all data-parallel ranks.

    Raises: ConfigError: the ranks of a node do not divide those of the axis.
    Communicates: opens two communicators, where there are several nodes.
    """
    if wire.between is None and not wire.is_gather_split:
        return {}
    names = axes.dense
    comm = axes.shard if is_sharded else axes.data
    axis = cast(MeshAxis, names.shard if is_sharded else names.all)
    levels = _levels(axes.mesh, axis, wire.ranks_per_node or "auto", hosts, code="wire-nodes")
    if levels is None:
        return {}
    return {names.shard: TwoLevels(comm, *levels, is_gather_split=wire.is_gather_split)}


def _levels(
    mesh: Mesh, axis: MeshAxis, ranks_per_node: int | str, of_all: Sequence[str], *, code: str
) -> tuple[Communicator, Communicator] | None:
    """The ranks along an axis of this node, and those at this rank's place on the nodes; None: there is one node.

    The same on every rank, since all of them open the two communicators.

    Args:
        of_all: the host of each rank.
        code: of the error.

    Raises: ConfigError: the ranks of a node do not divide those of the axis.
    """
    size = mesh.size(axis)
    if isinstance(ranks_per_node, str):
        groups = [[of_all[rank] for rank in group] for group in mesh.groups(axis)]
        ranks_per_node = groups[0].count(groups[0][0])
        for hosts in groups:
            runs = [set(hosts[at : at + ranks_per_node]) for at in range(0, size, ranks_per_node)]
            if size % ranks_per_node or any(len(run) > 1 for run in runs) or len(set(hosts)) < len(runs):
                return None  # the nodes have other numbers of these ranks, or not in a row
    if size % ranks_per_node:
        fits = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ConfigError(
            f"ranks_per_node is {ranks_per_node}, which does not divide {size} ranks along {axis!r}.",
            do=f"write one of {fits}, or leave it out.",
            code=code,
        )
    if ranks_per_node in (1, size):
        return None
    sizes = (size // ranks_per_node, ranks_per_node)
    world = current_world()
    local, node = (world.communicator(factor_axis(axis, sizes, (at,)), mesh) for at in (1, 0))
    return local, node


def split(
    model: nn.Module, axes: Axes, config: Config, device: torch.device, wire: WireFormat | None = None
) -> tuple[Specs, frozenset[str]]:
    """Split a model by the config's plan, or by the model's own.

    Returns: the parts, by name; names of the parameters of whose gradient each rank has a summand.
    """
    comm, etp, mesh = axes.comms["tp"], axes.get("etp"), axes.mesh
    overlap = config.tensor_parallel.tp_overlap_comm
    asked, partition = config.parallel, config.tensor_parallel.partition_config or PartitionConfig()
    plan = asked.tp_plan
    if plan == "auto":
        specs = [spec.model_dump() for spec in partition.layer_specs]
        keep = partial(without_experts, model) if etp is None else dict
        plan = plan_for(model, layer_specs=specs, use_default_specs=partition.use_default_specs, keep=keep)
    if etp is not None:
        _check_expert_split(config)
        plan = complete_plan(model, plan)
    if asked.tp_grid != "1d":
        if asked.tp_sequence_parallel or overlap in (True, "symmetric_memory") or wire is not None:
            raise ConfigError(
                f"parallel.tp_grid is {asked.tp_grid!r}, with tp_sequence_parallel, tp_overlap_comm or wire.tensor, "
                "which are of layers split along one dim.",
                do="turn those off (on a grid all activations between the layers are split), or set tp_grid to 1d.",
                code="tensor-parallel",
            )
        grid = Grid.open(current_world(), mesh, asked.tp_grid)
        return parallelize_grid(model, grid, plan, loss_parallel=asked.tp_loss_parallel), frozenset()
    least = LEAST_NBYTES if overlap == "auto" else 0
    if overlap == "symmetric_memory":
        if not asked.tp_sequence_parallel or wire is not None:
            raise ConfigError(
                'tensor_parallel.tp_overlap_comm is "symmetric_memory", and tp_sequence_parallel is false or '
                "wire.tensor set: these products gather and scatter parts of the sequence, as they are.",
                do="set parallel.tp_sequence_parallel to true and leave out wire.tensor, or tp_overlap_comm to true.",
                code="tensor-parallel",
            )
        comm, overlap = PartsCommunicator(comm, device), True
    elif overlap == "auto":  # a CPU computes while the host waits; a compiled block has its collectives in its graph
        overlap = not config.compile.enabled and wire is None and is_accelerator(device)
    if asked.tp_sequence_parallel and overlap and wire is None and not isinstance(comm, PartsCommunicator):
        # A part is sent to each rank by itself: between nodes one collective for all of them sends less.
        world = current_world()
        is_near = len(set(world.hosts(comm, mesh.ranks_along("tp", world.rank), node(), label="nodes"))) == 1
        comm = PartsCommunicator(comm) if is_near else comm
    parallel = parallelize(
        model,
        comm,
        plan,
        sequence_parallel=asked.tp_sequence_parallel,
        loss_parallel=asked.tp_loss_parallel,
        strict=partition.strict_mode,
        overlap=overlap,
        chunk_nbytes=least,
        inner={} if etp is None else {name: etp for name, _, _ in modules_with_experts(model)},
        wire=wire,
    )
    etp = None if etp is None else encoded(etp, wire)
    for name, _, held in modules_with_experts(model):
        held.tensor = TensorRanks(etp=etp, region=None if parallel.region_of is None else parallel.region_of(name))
    # Ranks along ``tp_fold`` have other tokens; those along ``etp`` have gathered theirs.
    is_folded = _is_folded(axes)
    of_experts = {name for name, held in _parameters_of_experts(model) if is_folded and held.tensor.splits_sequence}
    return dict(parallel.parts), parallel.partial | of_experts


def _check_declared(model: nn.Module, declared: Specs, etp: Communicator) -> None:
    """Raises: ModelError: experts are split over all tensor-parallel ranks already."""
    expert = next((name for name, _ in _parameters_of_experts(model) if name in declared), None)
    if expert is not None:
        raise ModelError(
            f"{expert} is split over all tensor-parallel ranks already, and expert_tensor_parallel_size is {etp.size}.",
            do="set expert_parallel.expert_tensor_parallel_size to the number of these ranks; or hand over a model"
            " whose experts are whole.",
            code="tensor-parallel-plan",
        )


def _check_expert_split(config: Config) -> None:
    """Raises: ConfigError: what does not go with experts that are split over tensor-parallel ranks."""
    if config.parallel.tp_grid != "1d":
        raise ConfigError(
            "each expert is split over tensor-parallel ranks, which does not go with parallel.tp_grid.",
            do='set parallel.tp_grid to "1d"; or expert_parallel.expert_tensor_parallel_size to 1, and'
            " enable_expert_tensor_parallelism of MoE to False.",
            code="expert-parallel-size",
        )


def _is_declared(parameter: torch.Tensor) -> bool:
    """True if the script says that this is a rank's part of a tensor; see ``declared_parts``."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def declared_parts(model: nn.Module, comm: Communicator) -> tuple[Specs, frozenset[str]]:
    """The parts that a model which is split already declares on its parameters, as Megatron-LM's layers do.

        parameter.tensor_model_parallel   this rank's part of a larger parameter
        parameter.partition_dim           the dim that is split
        parameter.partition_stride        blocks of that dim, each split (2 of a fused gate and up projection)
        parameter.sequence_parallel       the same on all tensor-parallel ranks; its gradient is summed over them

    Returns: as ``split``.
    Communicates: the sizes of the parts.
    Raises: ModelError: the ranks declare parts that do not fit together.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    own = {name: p for name, p in named.items() if _is_declared(p)}
    partial = frozenset(name for name, p in named.items() if getattr(p, "sequence_parallel", False))
    shapes = comm.gather_objects({name: list(parameter.shape) for name, parameter in own.items()}, label="parts")
    if any(each.keys() != shapes[0].keys() for each in shapes):
        raise ModelError(
            "the tensor-parallel ranks declare parts of different parameters.",
            where=f"{comm.size} tensor-parallel ranks",
            do="set tensor_model_parallel on the same parameters of every rank.",
            code="model-parts",
        )
    parts = {name: _part(name, parameter, [each[name] for each in shapes], comm) for name, parameter in own.items()}
    return parts, partial


def _part(name: str, parameter: nn.Parameter, shapes: list[list[int]], comm: Communicator) -> ParameterSpec:
    dim, stride = int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1))
    own = shapes[comm.rank]
    others = {tuple(shape[:dim] + shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1 or any(shape[dim] % stride for shape in shapes):
        raise ModelError(
            f"parameter {name!r} has parts of shapes {shapes}, split in dim {dim} inside each of {stride} blocks.",
            where=f"{comm.size} tensor-parallel ranks",
            do="give the parts the same size in every other dim, and a multiple of partition_stride in this one.",
            code="model-parts",
        )
    block = sum(shape[dim] for shape in shapes) // stride
    begin, size = sum(shape[dim] for shape in shapes[: comm.rank]) // stride, own[dim] // stride
    ranges = tuple((index * block + begin, index * block + begin + size) for index in range(stride))
    return ParameterSpec.along(name, (*own[:dim], block * stride, *own[dim + 1 :]), dim, ranges)


def synchronize_whole(
    model: nn.Module, parts: Specs, comm: Communicator, device: torch.device, etp: Communicator | None
) -> None:
    """Give the buffers and the parameters that are not split the first rank's values, and torch its random states.

    Args:
        etp: the ranks that hold the same experts, where others hold other ones; None: there is one.

    Communicates: a broadcast of each over the tensor-parallel axis; of divided experts over ``etp``.
    """
    divided = {name for name, held in _parameters_of_experts(model) if held.ep_size > 1}
    # zero.Init's are rank 0's
    named = [(name, p) for name, p in model.named_parameters() if OWNERS.get(p) is None]
    tensors = {name: p.data for name, p in named if name not in parts}
    with torch.no_grad():
        for name, tensor in [*tensors.items(), *model.named_buffers()]:
            ranks = etp if name in divided else comm
            if ranks is not None and not tensor.is_meta and tensor.numel():
                flat = tensor.detach().to(device).reshape(-1).clone()
                ranks.blocking.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, 0, label=name)
                tensor.copy_(flat.view(tensor.shape))
    share_generator_states(comm, Device(device))
