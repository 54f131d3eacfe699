"""Functions that compiled code calls as one operator: they run uncompiled, with an autograd graph of their own.

    compiled forward     output, ticket = an operator -> run(function, tensors)     keeps the graph by its ticket
    compiled backward    shoal::kept_backward(gradient, ticket) -> the tensors' gradients

A graph lives as long as the memory of its ticket, a tensor that the compiler keeps for backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shoal.compiler import eager_operator
from shoal.streams import host_memory


class _KeptValue(bytearray):
    """The memory of a ticket, and what its number stands for."""

    value: Any


_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, _KeptValue] = weakref.WeakValueDictionary()


def ticket_of(value: Any) -> Tensor:
    """A tensor as long as whose memory ``value`` lives. Shape: [1], int64."""
    number = next(_numbers)
    kept = _by_number[number] = _KeptValue(number.to_bytes(8, "little"))
    kept.value = value
    return host_memory(torch.frombuffer(kept, dtype=torch.int64), is_pinned=False)


def behind(ticket: Tensor) -> Any:
    """The value that the ticket was made of."""
    return _by_number[int(ticket)].value


def run(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    *,
    out: Tensor,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """``function(*tensors)``, without autograd, and a ticket.

    A compiler knows nothing of the graph, and may write other tensors into the memory of ``tensors`` and of the result
    before backward: the graph is of copies, and keeps those that backward reads.

    Args:
        parameters: leaves that the function reads itself. Backward returns their gradients after those of ``tensors``.
        out: empty, as the result was promised to the compiler.
        keeps: keep the graph for a backward pass.

    Memory: a copy of each of ``tensors`` meanwhile; until backward what the function saves.
    """
    if not keeps:
        return result_like(out, function(*tensors)), torch.zeros(1, dtype=torch.int64, device="cpu")
    # An operator runs below autograd, which would record nothing here.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        start = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        inputs: list[Tensor] = [_KeptInput.apply(start, tensor.detach().clone()) for tensor in tensors]
        output = function(*inputs)
    edges = [get_gradient_edge(tensor) for tensor in inputs]
    return out.copy_(output.detach()), ticket_of((get_gradient_edge(output), [*edges, *parameters]))


class _KeptInput(torch.autograd.Function):
    """Where a kept graph begins: a node that does not keep the tensor, as a leaf's would."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def result_like(wanted: Tensor, result: Tensor) -> Tensor:
    """``result``, in the order in memory of ``wanted``, which was promised to the compiler."""
    return result if result.stride() == wanted.stride() else wanted.copy_(result)


@eager_operator("shoal::kept_backward")
def kept_backward(
    gradient: Tensor, ticket: Tensor, sizes: list[int], strides: list[int], dims: list[int]
) -> list[Tensor]:
    """The gradients of the tensors of ``run``.

    Args:
        sizes, strides: of all of them, one after the other; ``dims``: how many of each.
    """
    output, inputs = behind(ticket)
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients = torch.autograd.grad(output, inputs, gradient, retain_graph=keep, allow_unused=True)
    empty = _empty(gradient, sizes, strides, dims)
    return [like.zero_() if own is None else result_like(like, own) for like, own in zip(empty, gradients, strict=True)]


@kept_backward.register_fake
def _(gradient: Tensor, ticket: Tensor, sizes: list[int], strides: list[int], dims: list[int]) -> list[Tensor]:
    return _empty(gradient, sizes, strides, dims)


def _empty(like: Tensor, sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    made, at = [], 0
    for num in dims:
        made.append(like.new_empty_strided(sizes[at : at + num], strides[at : at + num]))
        at += num
    return made


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """For ``register_autograd`` of an operator whose first argument are the tensors."""
    empty = [torch.empty_like(tensor, device="meta") for tensor in inputs[0]]
    ctx.sizes = [size for tensor in empty for size in tensor.shape]
    ctx.strides = [stride for tensor in empty for stride in tensor.stride()]
    ctx.dims = [tensor.dim() for tensor in empty]
    ctx.save_for_backward(output[1])
    ctx.num_others = len(inputs) - 1


def backward(ctx: Any, gradient: Tensor, _of_ticket: Tensor) -> tuple[Any, ...]:
    """For ``register_autograd``."""
    (ticket,) = ctx.saved_tensors
    gradients = torch.ops.shoal.kept_backward(gradient, ticket, ctx.sizes, ctx.strides, ctx.dims)
    return gradients, *[None] * ctx.num_others
