"""Experts whose own matrices are split over tensor-parallel ranks: the first by columns, the second by rows.

    rows -> first matrices [.., I / etp] -> second matrix [I / etp, ..] -> all-reduce over etp -> + bias

The ranks along ``etp`` send the same tokens along ``ep``, to the ranks that hold the same part of other experts.
Stacked parameters are split here; linears of experts in a list by the tensor-parallel plan, which this file completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import ModelError
from shoal.parallel.expert.held import modules_with_experts
from shoal.parallel.tensor.apply import keep_part
from shoal.parallel.tensor.families import FEED_FORWARD_RULES
from shoal.parallel.tensor.parts import even_ranges
from shoal.parallel.tensor.plan import Plan, by_rules, is_linear, join, match
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import cut


def split_stacks(model: nn.Module, comm: Communicator) -> dict[str, ParameterSpec]:
    """Keep this rank's part of each expert in stacked parameters, in place.

    Args:
        comm: the ranks over which each expert is split.

    Returns: by name, the part of each parameter that is split.
    Raises: ModelError: nothing says which dims are split, or they do not divide.
    """
    found: dict[str, ParameterSpec] = {}
    for prefix, module, held in modules_with_experts(model):
        if held.form != "stacked":
            continue
        held.tp = comm
        parameters = dict(module.named_parameters())
        if not held.split_dims.keys() & parameters.keys():
            raise _unknown(prefix, "ExpertsHeld(split_dims=...) has none of its parameters")
        for name, split in held.split_dims.items():
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
            found[spec.name] = spec
            keep_part(parameters[name], partial(cut, spec=spec))
    return found


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
        if styles := by_rules(dict(expert.named_modules()), {}, (), FEED_FORWARD_RULES):
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
