"""What a rank keeps of a model's experts, in place: some of them (``divide``), of each a part (``split_stacks``).

    specs = divide(model, world.communicator("ep", mesh))
    specs["layers.0.mlp.experts.down_proj"].local    # which experts this rank holds

Each rank keeps its experts of its own values: the ranks must have the same, or the model must be on the meta device or
sharded by ``zero.Init``, which show shapes only.

On tensor-parallel ranks the first matrices of an expert are split by columns, the second by rows:

    rows -> first matrices [.., I / etp] -> second matrix [I / etp, ..] -> all-reduce over etp -> + bias

The ranks along ``etp`` send the same tokens along ``ep``, to the ranks that hold the same part of other experts.
Stacked parameters are split here; linears of experts in a list by the tensor-parallel plan, which this file completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ConfigError, ModelError
from shoal.parallel.expert.held import ExpertsHeld, global_names, modules_with_experts
from shoal.parallel.tensor.apply import keep_part
from shoal.parallel.tensor.families import FEED_FORWARD_RULES
from shoal.parallel.tensor.parts import as_ranges, even_ranges
from shoal.parallel.tensor.plan import Plan, by_rules, is_linear, join, match
from shoal.sharding.layout import ParameterSpec


def divide(
    model: nn.Module,
    comm: Communicator | None,
    same_tokens: Communicator | None = None,
    pp: Communicator | None = None,
    parts: Mapping[str, ParameterSpec] | None = None,
    tokens: tuple[int, ...] = (),
) -> dict[str, ParameterSpec]:
    """Give each layer its expert-parallel ranks, and keep this rank's experts of stacked parameters.

    Args:
        comm: the ranks along ``ep``; None: there is one.
        same_tokens: the ranks that give each layer the same tokens, where these are not split along the sequence; None:
            all have their own.
        pp: the ranks that hold other layers, some of which may have no experts; None: there is one.
        parts: by name, what this rank holds of tensors that are split over tensor-parallel ranks.
        tokens: by rank of ``comm`` a number, equal for those of ``same_tokens``.

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
        same = None if held.tensor.splits_sequence else same_tokens
        held.tensor = replace(held.tensor, same=same, tokens=tokens)
    _check_alike(divided, comm)
    if not any([bool(divided)] if pp is None else pp.gather_objects(bool(divided), label="stages with experts")):
        raise ModelError(
            f"{size} expert-parallel ranks, and no layer of {type(model).__name__} has experts to divide among them"
            + (f" (those of {layers[0][0]} have ep_size 1)." if layers else "."),
            do="set parallel.ep to 1; or build the model with moe.layer.MoE(ep_size=...), or enable expert_parallel for"
            " a Hugging Face model.",
            code="expert-parallel-model",
        )
    rename, specs, parts = global_names(model), {}, parts or {}
    for prefix, module, held in divided:
        for name, parameter in module.named_parameters():
            local = f"{prefix}.{name}"
            part = parts.get(local) or ParameterSpec.whole(local, tuple(parameter.shape))
            if held.stack is None:
                specs[local] = replace(part, name=rename(local))
                continue
            num_rows = held.num_experts * held.stack.rows
            is_divided = parameter.shape[:1] == (num_rows // size,)  # by an engine that had the model before
            if not is_divided and parameter.shape[:1] != (num_rows,):
                raise ModelError(
                    f"parameter {local!r} of shape {tuple(parameter.shape)} is not one of {held.num_experts} experts.",
                    do="give every parameter of stacked experts the experts as its first dimension.",
                    code="expert-parallel-model",
                )
            ranges = as_ranges(held.ids, unit=held.stack.rows)
            specs[local] = ParameterSpec.part(local, (num_rows, *part.global_shape[1:]), (ranges, *part.local[1:]))
            if not is_divided:
                own = ParameterSpec.along(local, (num_rows, *parameter.shape[1:]), 0, ranges)
                keep_part(parameter, own)
    return specs


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


def split_stacks(model: nn.Module, comm: Communicator) -> dict[str, ParameterSpec]:
    """Keep this rank's part of each expert in stacked parameters, in place.

    Args:
        comm: the ranks over which each expert is split.

    Returns: by name, the part of each parameter that is split.
    Raises: ModelError: nothing says which dims are split, or they do not divide.
    """
    specs: dict[str, ParameterSpec] = {}
    for prefix, module, held in modules_with_experts(model):
        if held.stack is None:
            continue
        held.tensor = replace(held.tensor, etp=comm)
        parameters = dict(module.named_parameters())
        if not held.stack.split_dims.keys() & parameters.keys():
            raise _unknown(prefix, "Stack(split_dims=...) has none of its parameters")
        for name, split in held.stack.split_dims.items():
            if name not in parameters:
                continue
            shape = tuple(parameters[name].shape)
            size = shape[split.dim]
            if size % (comm.size * split.fused):
                raise ModelError(
                    f"{prefix}.{name} of shape {shape} has {size // split.fused} elements in dim {split.dim}, which"
                    f" {comm.size} tensor-parallel ranks do not divide.",
                    do="set expert_parallel.expert_tensor_parallel_size to 1, or to another divisor of tp.",
                    code="expert-parallel-size",
                )
            blocks = (size,) if split.is_interleaved else (size // split.fused,) * split.fused
            ranges = even_ranges(blocks, comm.size, comm.rank)
            spec = ParameterSpec.along(f"{prefix}.{name}", shape, split.dim, ranges)
            specs[spec.name] = spec
            keep_part(parameters[name], spec)
    return specs


def complete_plan(model: nn.Module, plan: Plan) -> dict[str, str]:
    """A tensor-parallel plan with the linears of all experts in lists.

    An expert that the plan does not name is split by the rules for feed-forward modules; or if it has two linears: the
    first by columns, the second by rows.

    Raises: ModelError: another expert that the plan does not name.
    """
    named = match(plan, [name for name, _ in model.named_modules(remove_duplicate=False)])
    complete = dict(plan)
    for name, expert in _listed(model):
        linears = [join(name, inner) for inner, module in expert.named_modules() if is_linear(module)]
        if any(linear in named for linear in linears):
            continue
        if styles := by_rules(dict(expert.named_modules()), {}, FEED_FORWARD_RULES):
            complete.update({join(name, inner): style for inner, style in styles.items()})
            continue
        if len(linears) != 2:
            raise _unknown(name, f"it has {len(linears)} linear layers that the tensor-parallel plan does not name")
        complete.update(zip(linears, ("column", "row"), strict=True))
    return complete


def without_experts(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """The styles of modules that are not inside experts in lists which ranks divide."""
    prefixes = tuple(f"{name}." for name, _ in _listed(model, is_divided=True))
    own = tuple(prefix.removesuffix(".") for prefix in prefixes)
    return {name: style for name, style in styles.items() if not name.startswith(prefixes) and name not in own}


def _listed(model: nn.Module, *, is_divided: bool = False) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module, held in modules_with_experts(model):
        if held.form == "listed" and (held.ep_size > 1 or not is_divided):
            yield from ((join(prefix, name), expert) for name, expert in module.named_children())


def _unknown(name: str, why: str) -> ModelError:
    return ModelError(
        f"nothing says how {name} is split over tensor-parallel ranks: {why}.",
        do="name its linear layers in parallel.tp_plan, or set expert_parallel.expert_tensor_parallel_size to 1.",
        code="tensor-parallel-plan",
    )
