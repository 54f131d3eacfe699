"""Linear layers and norms on a grid of ranks (``grid``): autograd functions, and modules that call them.

    Y = X W^T + b                      gathered             multiplied          summed
    forward                            X, W                 Y = X W^T           Y
    backward, of the input             Y's gradient, W      dX = dY W           dX
    backward, of the weight            (dY), X              dW = dY^T X         dW

Each gather is one all-gather over q ranks (or d), each sum the reduce-scatter of the same bytes in the other direction.
Only the rank's own blocks of X and W are kept for backward, which gathers them again.

Source: SUMMA's three products (C = A B, A B^T, A^T B): arXiv:2104.05343, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm import autograd
from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator
from shoal.compiler import untraced
from shoal.parallel.tensor.grid import ActivationLayout, GridProduct
from shoal.parallel.tensor.parts import SharedRows
from shoal.parallel.tensor.region import SharedByCopies, cast_for_autocast


def grid_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: GridProduct, *, label: str
) -> torch.Tensor:
    """This rank's part of ``X W^T + b``.

    Args:
        input: this rank's part of X, [tokens, ..., in].
        weight: this rank's part of W, [out, in].
        bias: this rank's slice of b; the output's layout says which.

    Communicates: with T tokens, a grid of q x q x d ranks (2-D: d = 1, 3-D: d = q) and the bytes of an element as unit,
        X = (q - 1) / q * T / q * in / d, W = (q - 1) / q * out / q * in / d, Y = (d - 1) / d * T / q * out / q:
        forward X + W + Y, backward 2 X + 2 W + Y received per rank. For a bias B = out / (q d) - out / (q q d) (3-D:
        out / q - out / q^3) forward, and as much backward.
    Memory: until the end of each pass the gathered X, W and the product; for backward ``input`` and ``weight``.
    """
    apply: Callable[..., torch.Tensor] = _GridProductFunction.apply
    output = apply(*cast_for_autocast(input, weight), product, label)  # gathered in autocast's lower precision
    if bias is None:
        return output
    return output + whole_vector(bias.to(output.dtype), product.output, label=f"{label} bias")


def whole_vector(part: torch.Tensor, layout: ActivationLayout, *, label: str) -> torch.Tensor:
    """The values of a parameter for this rank's elements, from the slices of the ranks that have the same elements."""
    for comm in layout.same_elements:
        part = autograd.all_gather(part, comm, label=label)
    return part


class _GridProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, by: GridProduct, label: str) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.by, ctx.label = by, label
        whole = _gather(input, by.input_over, by.input_dim, f"{label} input")
        partial = F.linear(whole, _gather(weight, by.weight_over, 1, f"{label} weight"))
        return _sum_part(partial, by.output_over, by.output_dim, f"{label} output")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        by, label = ctx.by, f"{ctx.label} backward"
        gradient = _gather(gradient, by.output_over, by.output_dim, f"{label} output")
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            partial = gradient @ _gather(weight, by.weight_over, 1, f"{label} weight")
            of_input = _sum_part(partial, by.input_over, by.input_dim, f"{label} input")
        if ctx.needs_input_grad[1]:
            whole = _gather(own, by.input_over, by.input_dim, f"{label} input again")
            partial = gradient.flatten(0, -2).t() @ whole.flatten(0, -2)
            of_weight = _sum_part(partial, by.weight_over, 1, f"{label} weight's gradient")
        return of_input, of_weight, None, None


def _gather(tensor: torch.Tensor, comm: Communicator, dim: int, label: str) -> torch.Tensor:
    return autograd.all_gather(tensor, comm, dim=dim, label=label)


def _sum_part(tensor: torch.Tensor, comm: Communicator, dim: int, label: str) -> torch.Tensor:
    return autograd.reduce_scatter(tensor, comm, dim=dim, label=label)


def grid_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: ActivationLayout,
    *,
    eps: float,
    is_centered: bool,
    label: str,
) -> torch.Tensor:
    """This rank's part of a LayerNorm (``is_centered``) or an RMSNorm over elements that several ranks have.

    Args:
        weight, bias: this rank's slices of the norm's parameters; ``layout.vector`` says which.

    Communicates: an all-reduce of one fp32 number per token, of a LayerNorm two, of the sums over the elements, and in
        backward one all-reduce of as many, over the ranks with the same tokens; ``weight`` and ``bias`` as a linear's
        bias.
    """
    whole_weight = None if weight is None else whole_vector(weight, layout, label=f"{label} weight")
    apply: Callable[..., torch.Tensor] = _GridNormFunction.apply
    output = apply(input, whole_weight, layout.same_tokens, eps, is_centered, label)
    return output if bias is None else output + whole_vector(bias, layout, label=f"{label} bias")


class _GridNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        comm: Communicator,
        eps: float,
        is_centered: bool,
        label: str,
    ) -> torch.Tensor:
        numel = input.shape[-1] * comm.size
        normed = input.float() if input.dtype.itemsize < 4 else input
        if is_centered:
            normed = normed - _total(normed.sum(-1, keepdim=True), comm, f"{label} mean") / numel
        squares = _total(normed.square().sum(-1, keepdim=True), comm, f"{label} variance")
        scale = torch.rsqrt(squares / numel + eps)
        normed = normed * scale
        ctx.save_for_backward(normed.to(input.dtype), scale, weight)
        ctx.comm, ctx.is_centered, ctx.label = comm, is_centered, label
        return (normed if weight is None else normed * weight).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        of_normed = gradient.to(scale.dtype) if weight is None else gradient.to(scale.dtype) * weight
        sums = [(of_normed * normed).sum(-1, keepdim=True)]
        if ctx.is_centered:
            sums.append(of_normed.sum(-1, keepdim=True))
        means = _total(torch.cat(sums, -1), ctx.comm, f"{ctx.label} backward") / (normed.shape[-1] * ctx.comm.size)
        of_input = of_normed - normed * means[..., :1]
        if ctx.is_centered:
            of_input = of_input - means[..., 1:]
        of_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = (gradient.to(scale.dtype) * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return (of_input * scale).to(gradient.dtype), of_weight, None, None, None, None


def _total(tensor: torch.Tensor, comm: Communicator, label: str) -> torch.Tensor:
    return autograd.all_reduce(tensor, comm, label=label)


@dataclass(frozen=True, eq=False)
class GridSplit(SharedByCopies):
    """How one linear or norm is computed on the grid, which its class of this file reads.

    Args:
        product: of a linear.
        is_transposed: the weight is [in, out] (GPT-2's Conv1D).
        shared: of a linear, the heads that ranks with other elements need too; None: there are none.
        layout: of a norm.
        eps, is_centered: of a norm.
    """

    name: str
    product: GridProduct | None = None
    is_transposed: bool = False
    shared: SharedRows | None = None
    layout: ActivationLayout | None = None
    eps: float = 0.0
    is_centered: bool = False


class GridParallelLinear(nn.Module):
    """A linear whose weight, input and output are blocks of a grid."""

    tensor_split: GridSplit
    weight: nn.Parameter

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split, bias = self.tensor_split, getattr(self, "bias", None)
        assert split.product is not None
        weight = self.weight.t() if split.is_transposed else self.weight
        output = grid_linear(input, weight, bias, split.product, label=split.name)
        if split.shared is None:
            return output
        return split.shared.complete(output, split.product.output.same_tokens, split.name)


class GridParallelNorm(nn.Module):
    """A LayerNorm or an RMSNorm over elements that several ranks have."""

    tensor_split: GridSplit

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        split = self.tensor_split
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        assert split.layout is not None
        return grid_norm(
            input, weight, bias, split.layout, eps=split.eps, is_centered=split.is_centered, label=split.name
        )
