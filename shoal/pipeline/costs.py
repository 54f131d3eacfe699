"""What a layer costs, and the split of layers into pipeline stages by it."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.device import Device
from shoal.errors import UsageError
from shoal.parallel.saved_tensors import counting_saved
from shoal.pipeline.balance import balance, uniform
from shoal.pipeline.layers import LayerOutline, TiedLayerSpec, build, type_name

METHODS = ("parameters", "uniform", "type:REGEX", "memory", "time")
_OPTIMIZER_STATES = 2  # Adam's


class MeasuredLayer(NamedTuple):
    """Of one layer and micro-batch."""

    seconds: float  # forward and backward
    state_bytes: int  # parameters; of trained ones also the gradient and two optimizer states
    saved_bytes: int  # what the forward saves for the backward
    input_bytes: int


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
    costs: Sequence[float] | Sequence[Sequence[float]]
    if kind == "uniform":
        return uniform(len(layers), num_stages)
    if kind == "parameters":
        costs = [layer.numel for layer in outlines]
    elif kind == "type" and pattern:
        costs = [float(re.search(pattern, type_name(layer), re.IGNORECASE) is not None) for layer in layers]
        if not any(costs):
            types = ", ".join(dict.fromkeys(map(type_name, layers)))
            raise _wrong(f"partition_method={method!r} matches no layer.", f"match one of the types: {types}.")
    elif kind in ("memory", "time"):
        if sample is None:
            raise _wrong(
                f"partition_method={method!r} runs each layer, and has no inputs.",
                "pass sample=..., the inputs of the first layer for one micro-batch; or the costs of the layers as"
                " partition_method.",
            )
        measured = measure(layers, outlines, sample, device)
        if kind == "time":
            costs = [cost.seconds for cost in measured]
        else:
            costs = memory_costs(measured, num_stages, virtual_stages, checkpoint_interval)
    else:
        raise _wrong(f"partition_method={method!r} is not known.", f"use one of {', '.join(METHODS)}.")
    return balance(costs, num_stages) if any(tree_leaves(costs)) else uniform(len(layers), num_stages)


def measure(
    layers: Sequence[Any], outlines: Sequence[LayerOutline], sample: Any, device: torch.device, repeats: int = 3
) -> list[MeasuredLayer]:
    """Run each layer alone, forward and backward, on what the layer before returns.

    Random states are restored, and modules that are given built are copied.

    Memory: one layer at a time and what it saves; tied ones until the end.
    """
    costs: list[MeasuredLayer] = []
    received = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), sample)
    with random_states_kept(device):
        for index, module in build(layers, outlines, range(len(layers))):
            layer = layers[index]
            if module is not None:
                module = (copy.deepcopy(module) if layer is module else module).to(device)
            forward_fn = layer.forward_fn if isinstance(layer, TiedLayerSpec) else None
            call = partial(forward_fn, module) if forward_fn is not None else module or layer
            cost, received = measure_call(module, call, received, device, repeats)
            costs.append(cost)
    return costs


def measure_call(
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


def memory_costs(
    measured: Sequence[MeasuredLayer], num_stages: int, virtual_stages: int, checkpoint_interval: int
) -> list[list[float]]:
    """Bytes of each layer in each stage: stage s of n holds the activations of n - s micro-batches (1F1B)."""

    def activations(cost: MeasuredLayer) -> float:
        return cost.input_bytes / checkpoint_interval if checkpoint_interval else cost.saved_bytes

    held = [(num_stages - stage) / virtual_stages for stage in range(num_stages)]
    return [[cost.state_bytes + count * activations(cost) for cost in measured] for count in held]


def random_states_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restores the random states of the host and the device afterwards."""
    is_host = device.type == "cpu"
    return torch.random.fork_rng([] if is_host else [device], device_type="cuda" if is_host else device.type)


def _wrong(what: str, do: str) -> UsageError:
    return UsageError(what, do=do, code="pipeline-partition")
