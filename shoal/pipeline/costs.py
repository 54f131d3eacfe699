"""Where each pipeline stage begins, and what layers cost: those of a PipelineModule, the blocks of a model to be cut.

Each is run alone, forward and backward: layers one after the other, blocks where one forward of their model calls them.
Parameters on the meta device, and those that ``zero.Init`` has sharded, are random numbers meanwhile.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shoal.device import Device
from shoal.errors import UsageError
from shoal.parallel.saved_tensors import counting_saved
from shoal.parallel.sequence.chunks import cuts
from shoal.pipeline.blocks import find_blocks, find_outside, is_cache
from shoal.pipeline.layers import LayerOutline, TiedLayerSpec, build, type_name

Costs = Sequence[float] | Sequence[Sequence[float]]

METHODS = ("parameters", "uniform", "type:REGEX", "memory", "time")
_OPTIMIZER_STATES = 2  # Adam's


def balance(costs: Costs, num_stages: int) -> list[int]:
    """Where each stage begins, and the end, so that the largest cost of a stage is the smallest possible.

    No stage is empty. Of the splits with that largest cost it is the one with the smallest sum of squares; of several,
    the one whose earlier stages are longer. DeepSpeed's ``partition_balanced`` splits models of equal blocks alike.

    Args:
        costs: of each layer; or for each stage, those of each layer in it. At least as many layers as stages.

    >>> balance([1, 1, 1, 1, 4], 2), balance([1] * 10, 4)
    ([0, 4, 5], [0, 3, 6, 8, 10])
    >>> balance([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    [0, 1, 4]
    """
    is_by_stage = isinstance(costs[0], Sequence)
    by_stage = cast("Sequence[Sequence[float]]", costs if is_by_stage else [costs] * num_stages)
    sums = [list(accumulate(layer_costs, initial=0.0)) for layer_costs in by_stage]
    largest, _ = _best(sums, lambda total, cost: max(total, cost))
    _, bounds = _best(sums, lambda total, cost: total + cost * cost if cost <= largest else _NONE)
    return bounds


_NONE = float("inf")  # there is no such split


def _best(sums: Sequence[Sequence[float]], add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The split with the smallest total, by dynamic programming; ``add`` gives the total with one more stage."""
    num_layers = len(sums[0]) - 1
    best = [0.0] + [_NONE] * num_layers  # by how many layers the stages so far have
    begins: list[list[int]] = []
    for of_stage in sums:
        totals = [(_NONE, 0)]
        for end in range(1, num_layers + 1):
            totals.append(min((add(best[start], of_stage[end] - of_stage[start]), -start) for start in range(end)))
        best = [total for total, _ in totals]
        begins.append([-start for _, start in totals])
    bounds = [num_layers]
    for starts in reversed(begins):
        bounds.append(starts[bounds[-1]])
    return best[-1], bounds[::-1]


class MeasuredLayer(NamedTuple):
    """Of one layer and micro-batch."""

    seconds: float  # forward and backward
    state_bytes: int  # parameters; of trained ones also the gradient and two optimizer states
    saved_bytes: int  # what the forward saves for the backward
    input_bytes: int

    def plus(self, other: MeasuredLayer) -> MeasuredLayer:
        return MeasuredLayer._make(mine + theirs for mine, theirs in zip(self, other, strict=True))


_NOTHING = MeasuredLayer(0.0, 0, 0, 0)


def stage_bounds(
    method: str | Sequence[float],
    layers: Sequence[Any],
    outlines: Sequence[LayerOutline],
    num_stages: int,
    *,
    sample: Any = None,
    device: torch.device,
    virtual_stages: int = 1,
    checkpoint_interval: int = 0,
) -> list[int]:
    """Where each pipeline stage begins, and the end.

    Args:
        method: one of METHODS, or the cost of each layer.
        sample: the inputs of the first layer, for ``memory`` and ``time``.

    Raises: UsageError: fewer layers than stages, or a method that is not known, or that lacks what it needs.
    """
    if not isinstance(method, str):
        if len(method) != len(layers):
            raise _wrong(f"partition_method has {len(method)} costs for {len(layers)} layers.", "give one of each.")
        return balance(method, num_stages)
    kind, _, pattern = method.partition(":")
    kind = kind.lower()
    costs: Costs
    if kind == "uniform":
        return cuts(len(layers), num_stages)
    if kind == "parameters":
        costs = [layer.numel for layer in outlines]
    elif kind == "type" and pattern:
        costs = _by_type(pattern, [type_name(layer) for layer in layers], f"partition_method={method!r}", "layer")
    elif kind in ("memory", "time"):
        if sample is None:
            raise _wrong(
                f"partition_method={method!r} runs each layer, and has no inputs.",
                "pass sample=..., the inputs of the first layer for one micro-batch; or the costs of the layers as"
                " partition_method.",
            )
        measured = measure(layers, outlines, sample, device)
        costs = _costs_of(kind, measured, num_stages, virtual_stages, checkpoint_interval)
    else:
        raise _wrong(f"partition_method={method!r} is not known.", f"use one of {', '.join(METHODS)}.")
    return balance(costs, num_stages) if any(tree_leaves(costs)) else cuts(len(layers), num_stages)


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
    Memory: the modules outside the blocks, one block, and what it saves.
    """
    blocks = find_blocks(model)
    names = [blocks.name(block) for block in range(len(blocks.names))]
    key = f'pipeline.partition = "{method}"'
    if method.casefold().startswith("type:"):
        types = [type(model.get_submodule(name)).__name__ for name in names]
        return _by_type(method.partition(":")[2], types, key, "block")
    for attribute in ("pipeline_sample", "dummy_inputs"):
        sample = getattr(model, attribute, None) if sample is None else sample
    if sample is None:
        raise _wrong(
            f"{key} runs each block, and there is no micro-batch to run it on.",
            "set model.pipeline_sample to one micro-batch, as the model's forward takes it, before initialize().",
        )
    outside = find_outside(model, blocks, tuple(first_stage), tuple(last_stage), tuple(every_stage))
    measured = _measure_in_place(model, [*names, *outside.modules], sample, device)
    costs = [measured.get(name, _NOTHING) for name in names]
    for name, side in outside.modules.items():
        for at, is_there in ((0, side != "last"), (-1, side != "first")):
            if is_there and name in measured:
                costs[at] = costs[at].plus(measured[name])
    return _costs_of(method.casefold(), costs, num_stages, virtual_stages, checkpoint_interval)


def _by_type(pattern: str, types: Sequence[str], method: str, what: str) -> list[float]:
    costs = [float(re.search(pattern, each, re.IGNORECASE) is not None) for each in types]
    if not any(costs):
        raise _wrong(f"{method} matches no {what}.", f"match one of the types: {', '.join(dict.fromkeys(types))}.")
    return costs


def _costs_of(
    kind: str, measured: Sequence[MeasuredLayer], num_stages: int, virtual_stages: int, checkpoint_interval: int
) -> Costs:
    """Seconds ("time"); else bytes in each stage: stage s of n holds the activations of n - s micro-batches (1F1B)."""
    if kind == "time":
        return [cost.seconds for cost in measured]

    def activations(cost: MeasuredLayer) -> float:
        return cost.input_bytes / checkpoint_interval if checkpoint_interval else cost.saved_bytes

    num_micro = [(num_stages - stage) / virtual_stages for stage in range(num_stages)]
    return [[cost.state_bytes + count * activations(cost) for cost in measured] for count in num_micro]


def measure(
    layers: Sequence[Any], outlines: Sequence[LayerOutline], sample: Any, device: torch.device, repeats: int = 3
) -> list[MeasuredLayer]:
    """Run each layer alone, forward and backward, on what the layer before returns.

    Random states are restored, and modules that are given built are copied.

    Memory: one layer at a time and what it saves; tied ones until the end.
    """
    costs: list[MeasuredLayer] = []
    received = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    with _random_states_kept(device):
        for index, module in build(layers, outlines, range(len(layers))):
            layer = layers[index]
            if module is not None:
                module = (copy.deepcopy(module) if layer is module else module).to(device)
            forward_fn = layer.forward_fn if isinstance(layer, TiedLayerSpec) else None
            call = partial(forward_fn, module) if forward_fn is not None else module or layer
            cost, received = _measure_call(module, call, received, device, repeats)
            costs.append(cost)
    return costs


def _measure_in_place(
    model: nn.Module, names: Sequence[str], sample: Any, device: torch.device
) -> dict[str, MeasuredLayer]:
    """By name, what modules cost where the model calls them."""
    measured: dict[str, MeasuredLayer] = {}
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    remaining = {
        name: _with_values(tensor, device)
        for name, tensor in tensors.items()
        if not any(name.startswith(f"{module}.") for module in names)
    }
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    with _random_states_kept(device), ExitStack() as replaced, torch.no_grad():
        for name in names:
            module: Any = model.get_submodule(name)
            before = module.__dict__.get("forward")
            module.forward = partial(_measured_call, module, before, name, measured, device)
            replaced.callback(_restore, module, before)
        args = tuple(args) if isinstance(args, tuple | list) else (args,)
        torch.func.functional_call(model, remaining, args, kwargs)
    return measured


def _restore(module: Any, forward: Callable[..., Any] | None) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


def _measured_call(
    module: nn.Module,
    forward: Callable[..., Any] | None,
    name: str,
    measured: dict[str, MeasuredLayer],
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
            return None if is_cache(leaf) else leaf  # a cache grows with each call

        call_args, call_kwargs = tree_map(argument, (args, kwargs))
        return made.forward(*call_args, **call_kwargs)  # hooks run once, around what is measured

    with torch.enable_grad():
        cost, output = _measure_call(made, call, None if hidden is None else leaves[hidden], device)
    measured[name] = measured.get(name, _NOTHING).plus(cost)
    return output


def _measure_call(
    module: nn.Module | None, call: Callable[[Any], Any], received: Any, device: torch.device, repeats: int = 3
) -> tuple[MeasuredLayer, Any]:
    """What one call costs, forward and backward, and what it returns.

    Args:
        module: whose parameters count.
        call: the forward, of what it received.
    """
    parameters = list(module.parameters()) if module is not None else []
    seconds, output = float("inf"), None
    for _ in range(repeats + 1):  # the first run also loads kernels; the fastest counts
        inputs = tree_map_only(
            # a copy: the layer may change its input in place
            torch.Tensor,
            lambda t: t.detach().requires_grad_(t.is_floating_point()).clone(),
            received,
        )
        Device(device).synchronize()
        start = time.perf_counter()
        with counting_saved(parameters) as num_saved:
            output = call(inputs)
        graded = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        saved_bytes = num_saved()
        torch.autograd.backward(graded, [torch.ones_like(tensor) for tensor in graded])
        Device(device).synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    for parameter in parameters:
        parameter.grad = None
    copies = {True: 2 + _OPTIMIZER_STATES, False: 1}
    state = sum(p.numel() * p.element_size() * copies[p.requires_grad] for p in parameters)
    num_received = sum(t.nbytes for t in tree_leaves(received) if isinstance(t, torch.Tensor))
    detached = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    return MeasuredLayer(seconds, state, saved_bytes, num_received), detached


def _with_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; random where it has no values."""
    is_absent = tensor.is_meta or (tensor.numel() > 1 and not any(tensor.stride()))  # on meta, or sharded
    value = (
        tensor.detach().to(device, copy=True)
        if not is_absent
        else torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    )
    value = value.to(device)
    if is_absent and value.is_floating_point():
        value.normal_(std=0.02)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _random_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restores the random states of the host and the device afterwards."""
    is_host = device.type == "cpu"
    return torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)


def _wrong(what: str, do: str) -> UsageError:
    return UsageError(what, do=do, code="pipeline-partition")
