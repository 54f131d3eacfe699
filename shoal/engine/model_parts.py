"""Which parts of the model's parameters this rank holds on a tensor-parallel or expert-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shoal.build.plan import ModelParts
from shoal.comm.protocol import Communicator
from shoal.comm.world import current_world
from shoal.config import Config
from shoal.config.parallel import PartitionConfig
from shoal.engine.over_stages import from_stages
from shoal.errors import ConfigError, ModelError
from shoal.mesh import factor_axis
from shoal.parallel.expert.divide import complete_plan, divide, split_stacks, without_experts
from shoal.parallel.expert.held import ExpertsHeld, TensorRanks, modules_with_experts
from shoal.parallel.tensor.apply import parallelize
from shoal.parallel.tensor.grid import Grid
from shoal.parallel.tensor.grid_apply import parallelize_grid
from shoal.parallel.tensor.plan import plan_for
from shoal.running.parameter_owner import OWNERS
from shoal.sharding.axes import Axes, ExpertAxis
from shoal.sharding.layout import ParameterSpec


def parts_of(model: nn.Module, axes: Axes, config: Config, device: torch.device) -> ModelParts:
    """What this rank holds of the model. On a tensor-parallel axis, a model that is whole is split.

    Raises: ModelError: the plan does not fit the model, or the model cannot be split as it is.
    Communicates: on a tensor-parallel axis: a broadcast of what is not split yet.
    """
    comm = axes.tp
    if comm is None:
        return ModelParts()
    declared, etp = declared_parts(model, comm), axes.etp
    owners = {name: OWNERS.get(parameter) for name, parameter in model.named_parameters()}
    lost = [
        name
        for name, o in owners.items()
        if o is not None and (name in declared.local or o.comm.size < axes.world.size)
    ]
    if lost:
        raise ModelError(
            f"{len(lost)} parameters that are sharded are parts of larger tensors already: {', '.join(lost[:4])}"
            f"{' ...' if len(lost) > 4 else ''}.",
            where=f"{comm.size} tensor-parallel ranks",
            do="hand over a model that zero.Init has sharded whole, over all ranks; initialize() splits it.",
            code="tensor-parallel-init",
        )
    synchronize_whole(model, declared, comm, device, etp)
    if etp is not None and etp is not comm:
        _check_declared(model, declared, etp)
    parts = declared if declared.local else split(model, axes, config)
    return parts if etp is None else replace(parts, local={**parts.local, **split_stacks(model, etp)})


def with_experts(
    model: nn.Module, parts: ModelParts, axes: Axes, config: Config, hosts: Sequence[str]
) -> tuple[ModelParts, Axes]:
    """Divide the experts of a model among the expert-parallel ranks.

    Args:
        hosts: of each rank.

    Returns: ``parts`` with those of the experts; the axes, with the ranks that hold parameters of other names.
    Raises: ModelError, ConfigError: the model has no experts to divide, or they do not fit the ranks.
    Communicates: as ``divide``; over pipeline stages, whether experts are in lists.
    """
    specs = divide(model, axes.ep, axes.tp_fold, axes.pp, parts.local)
    experts: dict[str, ExpertAxis] = dict.fromkeys(specs, "ep")
    for name, held in _parameters_of_experts(model):
        if name in specs and name in parts.local:
            experts[name] = "etp" if held.form == "listed" else "expert_model"
    is_folded = axes.etp is not None and axes.tp_fold is not None
    folded = frozenset(name for name, _ in _parameters_of_experts(model) if is_folded)
    if axes.mesh.etp == 1 and (split := [name for name in experts if experts[name] != "ep"]):
        raise ModelError(
            f"{split[0]} is of one expert, and is split over {axes.tp.size if axes.tp else 1} tensor-parallel ranks,"
            " which take different tokens to the experts.",
            do="set expert_parallel.expert_tensor_parallel_size to the number of these ranks, or leave experts whole.",
            code="tensor-parallel-plan",
        )
    named, hierarchy = axes, None
    if axes.ep is not None:  # what follows is the same on pipeline stages that have no experts
        has_lists = any(held.form == "listed" and held.ep_size > 1 for _, _, held in modules_with_experts(model))
        if any(from_stages(axes.pp, has_lists, "stages with lists of experts")):
            named = replace(axes, names=axes.world)
        hierarchy = _two_steps(axes, config.expert_parallel.ranks_per_node, hosts)
    for _, _, held in modules_with_experts(model):
        held.hierarchy = hierarchy if held.ep_size > 1 else None
    return replace(parts, local={**parts.local, **specs}, experts=experts, folded=folded), named


def _parameters_of_experts(model: nn.Module) -> Iterator[tuple[str, ExpertsHeld]]:
    """By name, in this rank's model."""
    for prefix, module, held in modules_with_experts(model):
        for name, _ in module.named_parameters():
            yield f"{prefix}.{name}", held


def _two_steps(
    axes: Axes, ranks_per_node: int | str, of_all: Sequence[str]
) -> tuple[Communicator, Communicator] | None:
    """The expert-parallel ranks of this node, and those at this rank's place on the nodes; None: there is one node.

    The same on every rank, since all of them open the two communicators.

    Args:
        of_all: the host of each rank.

    Raises: ConfigError: the ranks of a node do not divide the expert-parallel ranks.
    """
    assert axes.ep is not None
    size = axes.ep.size
    if isinstance(ranks_per_node, str):
        groups = [[of_all[rank] for rank in group] for group in axes.mesh.groups("ep")]
        ranks_per_node = groups[0].count(groups[0][0])
        for hosts in groups:
            runs = [set(hosts[at : at + ranks_per_node]) for at in range(0, size, ranks_per_node)]
            if size % ranks_per_node or any(len(run) > 1 for run in runs) or len(set(hosts)) < len(runs):
                return None  # the nodes have other numbers of these ranks, or not in a row
    if size % ranks_per_node:
        fits = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ConfigError(
            f"expert_parallel.ranks_per_node is {ranks_per_node}, which does not divide {size} expert-parallel ranks.",
            do=f"write one of {fits}, or leave it out.",
            code="expert-parallel-size",
        )
    if ranks_per_node in (1, size):
        return None
    sizes = (size // ranks_per_node, ranks_per_node)
    world = current_world()
    local, node = (world.communicator(factor_axis("ep", sizes, (at,)), axes.mesh) for at in (1, 0))
    return local, node


def split(model: nn.Module, axes: Axes, config: Config) -> ModelParts:
    """Split a model by the config's plan, or by the model's own."""
    comm, etp, mesh = axes.tp, axes.etp, axes.mesh
    assert comm is not None
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
        if asked.tp_sequence_parallel or config.tensor_parallel.tp_overlap_comm:
            raise ConfigError(
                f"parallel.tp_grid is {asked.tp_grid!r}, beside tp_sequence_parallel or tp_overlap_comm, which are of "
                "layers split along one dim.",
                do="turn those off (on a grid all activations between the layers are split), or set tp_grid to 1d.",
                code="tensor-parallel",
            )
        grid = Grid.open(current_world(), mesh, asked.tp_grid)
        return ModelParts(parallelize_grid(model, grid, plan, loss_parallel=asked.tp_loss_parallel))
    found = parallelize(
        model,
        comm,
        plan,
        sequence_parallel=asked.tp_sequence_parallel,
        loss_parallel=asked.tp_loss_parallel,
        strict=partition.strict_mode,
        overlap=config.tensor_parallel.tp_overlap_comm,
        inner={} if etp is None else {name: etp for name, _, _ in modules_with_experts(model)},
    )
    for name, _, held in modules_with_experts(model):
        held.tensor = TensorRanks(etp=etp, region=None if found.region_of is None else found.region_of(name))
    # Ranks along ``tp_fold`` have other tokens; those along ``etp`` have gathered theirs.
    folded = etp is not None and axes.tp_fold is not None
    own = {name for name, held in _parameters_of_experts(model) if folded and held.tensor.splits_sequence}
    return ModelParts(found.parts, found.partial | own)


def _check_declared(model: nn.Module, declared: ModelParts, etp: Communicator) -> None:
    """Raises: ModelError: experts are split over all tensor-parallel ranks already."""
    found = next((name for name, _ in _parameters_of_experts(model) if name in declared.local), None)
    if found is not None:
        raise ModelError(
            f"{found} is split over all tensor-parallel ranks already, and expert_tensor_parallel_size is {etp.size}.",
            do="set expert_parallel.expert_tensor_parallel_size to the number of these ranks; or hand over a model"
            " whose experts are whole.",
            code="tensor-parallel-plan",
        )


def _check_expert_split(config: Config) -> None:
    """Raises: ConfigError: what does not go with experts that are split over tensor-parallel ranks."""
    for key, is_set, default in (("parallel.tp_grid", config.parallel.tp_grid != "1d", '"1d"'),):
        if is_set:
            raise ConfigError(
                f"each expert is split over tensor-parallel ranks, which does not go with {key}.",
                do=f"set {key} to {default}; or expert_parallel.expert_tensor_parallel_size to 1, and"
                " enable_expert_tensor_parallelism of MoE to False.",
                code="expert-parallel-size",
            )


def declared_parts(model: nn.Module, comm: Communicator) -> ModelParts:
    """The parts that a model which is split already declares on its parameters, as Megatron-LM's layers do.

        parameter.tensor_model_parallel   this rank's part of a larger parameter
        parameter.partition_dim           the dim that is split
        parameter.partition_stride        blocks of that dim, each split (2 of a fused gate and up projection)
        parameter.sequence_parallel       the same on all tensor-parallel ranks; its gradient is summed over them

    Communicates: the sizes of the parts.
    Raises: ModelError: the ranks declare parts that do not fit together.
    """
    own = {name: p for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    partial = frozenset(name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False))
    shapes = comm.gather_objects({name: list(parameter.shape) for name, parameter in own.items()}, label="parts")
    if any(each.keys() != shapes[0].keys() for each in shapes):
        raise ModelError(
            "the tensor-parallel ranks declare parts of different parameters.",
            where=f"{comm.size} tensor-parallel ranks",
            do="set tensor_model_parallel on the same parameters of every rank.",
            code="model-parts",
        )
    local = {name: _part(name, parameter, [each[name] for each in shapes], comm) for name, parameter in own.items()}
    return ModelParts(local, partial)


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
    model: nn.Module, parts: ModelParts, comm: Communicator, device: torch.device, etp: Communicator | None
) -> None:
    """Give the buffers, the parameters that are not split and the default random numbers the first rank's values.

    Dropout on activations that all tensor-parallel ranks hold must be the same on all of them.

    Args:
        etp: the ranks that hold the same experts, where others hold other ones; None: there is one.

    Communicates: a broadcast of each over the tensor-parallel axis; of divided experts over ``etp``.
    """
    divided = {name for name, held in _parameters_of_experts(model) if held.ep_size > 1}
    # zero.Init's are rank 0's
    named = [(name, p) for name, p in model.named_parameters() if OWNERS.get(p) is None]
    tensors = {name: p.data for name, p in named if name not in parts.local}
    with torch.no_grad():
        for name, tensor in [*tensors.items(), *model.named_buffers()]:
            ranks = etp if name in divided else comm
            if ranks is not None and not tensor.is_meta and tensor.numel():
                flat = tensor.detach().to(device).reshape(-1).clone()
                ranks.blocking.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, 0, label=name)
                tensor.copy_(flat.view(tensor.shape))
    seeds = comm.gather_objects(torch.initial_seed(), label="seed")
    if comm.rank:
        torch.manual_seed(seeds[0])
