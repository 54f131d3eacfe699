"""The three matrix products of a linear layer. Another arithmetic is another ``Products``.

    output      y  = x W^T       [tokens, in], [out, in]      -> [tokens, out]
    of_input    dx = dy W        [tokens, out], [out, in]     -> [tokens, in]
    of_weight   dW = dy^T x      [tokens, out], [tokens, in]  -> [out, in]

Tokens may have several dims, which come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch.nn import functional as F

from shoal.comm.autograd import once_differentiable
from shoal.parallel.needed_gradients import needed_gradients


class GroupProducts(Protocol):
    """The products of groups of rows, each in one kernel. Groups may have no rows.

        output      y  = x W        [rows, in], [groups, in, out]     -> [rows, out]
        of_input    dx = dy W^T     [rows, out], [groups, in, out]    -> [rows, in]
        of_weight   dW = x^T dy     [rows, in], [rows, out]           -> [groups, in, out]

    ``ends``: int32, on the device, the row after the last one of each group. Rows are contiguous.
    """

    def takes(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        """True if there is a kernel for these on their device."""
        ...

    def output(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...

    def of_weight(self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...


class Products:
    """In the dtype of the operands.

    Attributes:
        groups: those of groups of rows; None: each group has products of its own.
    """

    groups: GroupProducts | None = None

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient @ weight

    def of_weight(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return weight_gradient(gradient, x)


PLAIN = Products()


class LayerProducts:
    """The products of layers that follow a precision schedule. Copies of a model share the object.

    Attributes:
        is_on: False: the layers compute as they are.
    """

    def __init__(self, products: Products) -> None:
        self._products = products
        self.is_on = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def products(self) -> Products:
        return self._products if self.is_on else PLAIN

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As ``F.linear``. An autocast weight is not kept for backward, since products take it as it is."""
        is_autocast = torch.is_autocast_enabled(x.device.type)
        if not self.is_on or not x.numel() or (x.dtype != weight.dtype and not is_autocast):
            return F.linear(x, weight, bias)
        (x,) = cast_for_autocast(x)
        apply: Callable[..., torch.Tensor] = _Multiply.apply
        return add_bias(apply(x, weight, self._products), bias)


AS_THEY_ARE = LayerProducts(PLAIN)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, products: Products) -> torch.Tensor:
        return products.output(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, ctx.products = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_input, for_weight, _ = needed_gradients(ctx)
        of_input = ctx.products.of_input(gradient, weight) if for_input else None
        return of_input, ctx.products.of_weight(gradient, x) if for_weight else None, None


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of ``x @ weight.t()``. Shape: [..., M], [..., K] -> [M, K]."""
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def add_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In the dtype of ``output``, as ``F.linear`` does it under autocast."""
    return output if bias is None else output + bias.to(output.dtype)


def cast_for_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """All in autocast's dtype where it is on: autograd functions are not cast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
