"""What the blocks of a model that is to be cut cost: each is run alone, forward and backward, in one forward of it.

Parameters on the meta device, and those that ``zero.Init`` has sharded, are random numbers meanwhile.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shoal.errors import UsageError
from shoal.pipeline.blocks import ModelBlocks, find_beside, find_blocks
from shoal.pipeline.costs import MeasuredLayer, measure_call, memory_costs, random_states_kept

Costs = Sequence[float] | Sequence[Sequence[float]]


def partition_costs(
    model: nn.Module,
    method: str,
    sample: Any,
    num_stages: int,
    device: torch.device,
    *,
    virtual_stages: int = 1,
    checkpoint_interval: int = 0,
    first_stage: Iterable[str] = (),
    last_stage: Iterable[str] = (),
    every_stage: Iterable[str] = (),
) -> Costs:
    """The cost of each block, or of each block in each stage, for ``cut(partition=...)``.

    Args:
        method: "time", "memory", or "type:REGEX" (blocks whose class matches, without regard to case).
        sample: one micro-batch, as the model's forward takes it: a dict of keywords, a tuple, or one argument. None:
            the model's ``pipeline_sample``, or else its ``dummy_inputs``, which models of Transformers have.

    Raises: UsageError: there is no sample, or no class matches.
    Memory: the modules beside the blocks, one block, and what it saves.
    """
    blocks = find_blocks(model)
    modules = [model.get_submodule(blocks.name(block)) for block in range(len(blocks.names))]
    if method.casefold().startswith("type:"):
        pattern = method.partition(":")[2]
        costs = [float(re.search(pattern, type(module).__name__, re.IGNORECASE) is not None) for module in modules]
        if any(costs):
            return costs
        types = ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
        raise _wrong(f'"{method}" matches no block', f"match one of the types: {types}.")
    if sample is None:
        sample = getattr(model, "pipeline_sample", None)
    if sample is None:
        sample = getattr(model, "dummy_inputs", None)
    if sample is None:
        raise _wrong(
            f'"{method}" runs each block, and there is no micro-batch to run it on',
            "set model.pipeline_sample to one micro-batch, as the model's forward takes it, before initialize().",
        )
    beside = find_beside(model, blocks, tuple(first_stage), tuple(last_stage), tuple(every_stage))
    measured = _measure_in_place(model, blocks, tuple(beside.modules), sample, device)
    costs_of = [measured.get(blocks.name(block), _NOTHING) for block in range(len(blocks.names))]
    for name, side in beside.modules.items():
        for at, is_there in ((0, side != "last"), (-1, side != "first")):
            if is_there and name in measured:
                costs_of[at] = _sum(costs_of[at], measured[name])
    if method.casefold() == "time":
        return [cost.seconds for cost in costs_of]
    return memory_costs(costs_of, num_stages, virtual_stages, checkpoint_interval)


_NOTHING = MeasuredLayer(0.0, 0, 0, 0)


def _sum(one: MeasuredLayer, other: MeasuredLayer) -> MeasuredLayer:
    return MeasuredLayer(
        one.seconds + other.seconds,
        one.state_bytes + other.state_bytes,
        one.saved_bytes + other.saved_bytes,
        one.input_bytes + other.input_bytes,
    )


def _measure_in_place(
    model: nn.Module, blocks: ModelBlocks, beside: Sequence[str], sample: Any, device: torch.device
) -> dict[str, MeasuredLayer]:
    """By name, what the blocks and the modules beside them cost where the model calls them."""
    found: dict[str, MeasuredLayer] = {}
    names = [*(blocks.name(block) for block in range(len(blocks.names))), *beside]
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    outside = {
        name: _with_values(tensor, device)
        for name, tensor in tensors.items()
        if not any(name.startswith(f"{measured}.") for measured in names)
    }
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    with random_states_kept(device), ExitStack() as replaced, torch.no_grad():
        for name in names:
            module: Any = model.get_submodule(name)
            before = module.__dict__.get("forward")
            module.forward = partial(_measured_call, module, before, name, found, device)
            replaced.callback(_restore, module, before)
        torch.func.functional_call(model, outside, tuple(args) if isinstance(args, tuple | list) else (args,), kwargs)
    return found


def _restore(module: Any, forward: Callable[..., Any] | None) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


def _measured_call(
    module: nn.Module,
    forward: Callable[..., Any] | None,
    name: str,
    found: dict[str, MeasuredLayer],
    device: torch.device,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward of a module while it is measured: of a copy on the device."""
    values = {id(t): _with_values(t, device) for t in (*module.parameters(), *module.buffers())}
    made = copy.deepcopy(module, {**values, id(module.__dict__["forward"]): forward})
    if forward is None:
        made.__dict__.pop("forward", None)
    leaves = tree_leaves((args, kwargs))
    hidden = next((at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), None)

    def call(received: Any) -> Any:
        at = iter(range(len(leaves)))

        def argument(leaf: Any) -> Any:
            if next(at) == hidden:
                return received
            # A cache of Transformers' grows with each call.
            return None if any(kind.__name__ == "Cache" for kind in type(leaf).__mro__) else leaf

        own_args, own_kwargs = tree_map(argument, (args, kwargs))
        return made.forward(*own_args, **own_kwargs)  # hooks run once, around what is measured

    with torch.enable_grad():
        cost, output = measure_call(made, call, None if hidden is None else leaves[hidden], device)
    found[name] = _sum(found[name], cost) if name in found else cost
    return output


def _with_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; random where it has no values."""
    is_absent = tensor.is_meta or (tensor.numel() > 1 and not any(tensor.stride()))  # on meta, or sharded
    value = tensor.detach().to(device, copy=True) if not is_absent else torch.zeros(tensor.shape, dtype=tensor.dtype)
    value = value.to(device)
    if is_absent and value.is_floating_point():
        value.normal_(std=0.02)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _wrong(what: str, do: str) -> UsageError:
    return UsageError(f"pipeline.partition = {what}.", do=do, code="pipeline-partition")
