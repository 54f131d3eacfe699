"""Divide the experts of a model among the ranks of expert parallelism, in place.

    specs = divide(model, world.communicator("ep", mesh))
    specs["layers.0.mlp.experts.down_proj"].local    # which experts this rank holds

Each rank keeps its experts of its own values: the ranks must have the same, or the model must be on the meta device or
sharded by ``zero.Init``, which show shapes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ConfigError, ModelError
from shoal.parallel.expert.held import ExpertsHeld, global_names, modules_with_experts
from shoal.parallel.tensor.apply import keep_part
from shoal.parallel.tensor.parts import as_ranges
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut


def divide(
    model: nn.Module,
    comm: Communicator | None,
    same_tokens: Communicator | None = None,
    pp: Communicator | None = None,
    parts: Mapping[str, ParameterSpec] | None = None,
) -> dict[str, ParameterSpec]:
    """Give each layer its expert-parallel ranks, and keep this rank's experts of stacked parameters.

    Args:
        comm: the ranks along ``ep``; None: there is one.
        same_tokens: the ranks that give each layer the same tokens, where these are not split along the sequence; None:
            all have their own.
        pp: the ranks that hold other layers, some of which may have no experts; None: there is one.
        parts: by name, what this rank holds of tensors that are split over tensor-parallel ranks.

    Returns: by name in this rank's model, what each parameter of experts is of the whole model. Layers whose experts
        are all on every rank are not in it.
    Raises: ModelError: the model has no layer whose experts can be divided, or the ranks have other layers.
        ConfigError: the ranks do not fit a layer.
    Communicates: the number of experts of each layer.
    """
    size = 1 if comm is None else comm.size
    layers = list(modules_with_experts(model))
    for name, _, held in layers:
        _set_ranks(name, held, comm, size)
    if comm is None:
        return {}
    divided = [(name, module, held) for name, module, held in layers if held.ep_size > 1]
    for _, _, held in divided:
        held.same_tokens = None if held.has_split_sequence else same_tokens
    _check_alike(divided, comm)
    if not any([bool(divided)] if pp is None else pp.gather_objects(bool(divided), label="stages with experts")):
        raise ModelError(
            f"{size} expert-parallel ranks, and no layer of {type(model).__name__} has experts to divide among them"
            + (f" (those of {layers[0][0]} have ep_size 1)." if layers else "."),
            do="set parallel.ep to 1; or build the model with moe.layer.MoE(ep_size=...), or enable expert_parallel for"
            " a Hugging Face model.",
            code="expert-parallel-model",
        )
    rename, found, parts = global_names(model), {}, parts or {}
    for prefix, module, held in divided:
        for name, parameter in module.named_parameters():
            local = f"{prefix}.{name}"
            part = parts.get(local) or ParameterSpec.whole(local, tuple(parameter.shape))
            if held.form == "listed":
                found[local] = replace(part, name=rename(local))
                continue
            num_rows = held.num_experts * held.rows
            is_divided = parameter.shape[:1] == (num_rows // size,)  # by an engine that had the model before
            if not is_divided and parameter.shape[:1] != (num_rows,):
                raise ModelError(
                    f"parameter {local!r} of shape {tuple(parameter.shape)} is not one of {held.num_experts} experts.",
                    do="give every parameter of stacked experts the experts as its first dimension.",
                    code="expert-parallel-model",
                )
            ranges = as_ranges(held.ids, unit=held.rows)
            found[local] = ParameterSpec.part(local, (num_rows, *part.global_shape[1:]), (ranges, *part.local[1:]))
            if not is_divided:
                own = ParameterSpec.along(local, (num_rows, *parameter.shape[1:]), 0, ranges)
                keep_part(parameter, partial(cut, spec=own))
    return found


def _check_alike(layers: Sequence[tuple[str, nn.Module, ExpertsHeld]], comm: Communicator) -> None:
    """Raises: ModelError: on all ranks, if they have other layers, or layers with other experts."""
    mine = [[name, held.num_experts, held.form, list(held.owners)] for name, _, held in layers]
    every = comm.gather_objects(mine, label="layers with experts")
    other = next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)
    if other is None:
        return
    pairs = zip_longest(every[0], every[other], fillvalue=["no layer", 0])
    first, second = next((one, two) for one, two in pairs if one != two)
    raise ModelError(
        f"the expert-parallel ranks have other layers: rank 0 has {first[0]} with {first[1]} experts, rank {other}"
        f" {second[0]} with {second[1]}, or they are divided otherwise.",
        where=f"{comm.size} expert-parallel ranks",
        do="build the same layers, with the same number of experts, on every rank.",
        code="expert-parallel-model",
    )


def _set_ranks(name: str, held: ExpertsHeld, comm: Communicator | None, size: int) -> None:
    """Raises: ConfigError: the layer was built for another number of ranks."""
    if held.form == "stacked":
        held.divide_among(size)
    if held.ep_size not in (1, size):
        raise ConfigError(
            f"the experts of {name} are divided among {held.ep_size} ranks (ep_size), and parallel.ep is {size}.",
            do=f"set parallel.ep to {held.ep_size}, or leave it out; all layers have the same ep_size, or 1.",
            code="expert-parallel-size",
        )
    held.set_ranks(comm if held.ep_size > 1 else None)


def wants_split(model: nn.Module) -> bool:
    """True if a layer was built for experts that are split over the tensor-parallel ranks."""
    return any(held.wants_split for _, _, held in modules_with_experts(model))


def ep_size_of(model: nn.Module) -> int | None:
    """The expert-parallel ranks that the model's layers were built for; None: they leave it open."""
    return max((held.ep_size for _, _, held in modules_with_experts(model) if held.ep_size > 1), default=None)
