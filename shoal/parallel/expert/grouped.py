"""Kernels on rows of tokens that are sorted by expert: gathered, multiplied by each expert's matrix, and summed.

    gather    rows[i]   = scale[i] * tokens[token_of[i]]
    linear    out[start[e] : end[e]] = rows[start[e] : end[e]] @ weight[e] + bias[e]
    sum       tokens[t] = sum over j of weights[t, j] * rows[row_of[t, j]], in the order of j

A linear is one matrix product for each expert that has rows. Gather and sum are each other's gradient; sums of 16-bit
values are computed in fp32 and rounded once. On a GPU each is one kernel (``shoal.kernels.expert_rows``, or torch's
where rows are only moved); on a CPU both work in blocks that stay in the cache. There are no atomic additions, so
results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.compiler import untraced
from shoal.device import capability, is_fake, numbers_on, numel_at_once
from shoal.kernels.use import has_kernels, one_kernel
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.expert.route import RowCounts
from shoal.parallel.needed_gradients import needed_gradients
from shoal.parallel.products import GroupProducts, Products, cast_for_autocast
from shoal.streams import simulation

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@untraced
def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """``rows`` of each expert times its weight, plus its bias.

    Args:
        rows: [rows, in], sorted by expert.
        weight: [experts, in, out]; a transposed view of [experts, out, in] is not copied.
        counts: the rows of each expert, as :func:`run_experts` gives them; they add up to ``rows``. They carry the
            layer's products, of few bits where ``fp8`` is on.
        bias: [experts, out].

    Returns: [rows, out]. The gradient of an expert without rows is zero.
    Order: the host reads ``counts``, unless torch's grouped kernel does it: bf16 on NVIDIA's Hopper and data
        centre Blackwell, with widths that are multiples of 8.
    """
    rows, weight, *rest = cast_for_autocast(rows, weight, *([] if bias is None else [bias]))
    bias = rest[0] if rest else None
    few_bits = counts.products.products if isinstance(counts, RowCounts) and counts.products.is_on else None
    groups = GROUPS_IN_BF16 if few_bits is None else few_bits.groups
    if groups is not None and groups.takes(rows, weight):
        out: Tensor = _InOneKernel.apply(rows, weight, bias, counts, groups)
    elif few_bits is None:
        out = _OneByOne.apply(rows, weight, bias, counts)
    else:
        out = _InFewBits.apply(rows, weight, counts, few_bits)
        return out if bias is None else add_bias_of_experts(out, bias, counts)
    return out


class _GroupsInBf16:
    """By torch's grouped kernel: strides and addresses are multiples of 16 bytes."""

    def takes(self, rows: Tensor, weight: Tensor) -> bool:
        if _grouped_mm is None or not rows.dtype == weight.dtype == torch.bfloat16 or not _is_for(rows):
            return False
        is_aligned = is_fake(weight) or weight.data_ptr() % 16 == 0
        return len(rows) > 0 and not (rows.shape[1] % 8 or weight.shape[2] % 8) and is_aligned

    def output(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = _grouped_mm(rows, weight, offs=ends)
        return out

    def of_input(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return self.output(gradient, weight.transpose(1, 2), ends)

    def of_weight(self, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        return self.output(left.t(), right, ends)


GROUPS_IN_BF16 = _GroupsInBf16()


def _is_for(rows: Tensor) -> bool:
    """True on the GPUs that torch has the kernel for. On others its loop reads each offset."""
    simulated = simulation()
    return capability(rows)[0] in (9, 10) if simulated is None else simulated.multiplies_groups


def feed_forward(
    rows: Tensor,
    counts: Sequence[int],
    held: ExpertsHeld,
    up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Two linears of each expert around an activation.

    Args:
        rows: [rows, in], sorted by expert.
        up, down: [experts, in, inner], [experts, inner, out]; of each expert the part that this rank has.

    Communicates: where experts are split over tensor-parallel ranks, an all-reduce of the rows in forward and backward.
    """
    inner = activation(grouped_linear(held.enter(rows), up, counts, up_bias))
    if held.tensor.etp is None:
        return grouped_linear(inner, down, counts, down_bias)
    out = held.leave(grouped_linear(inner, down, counts))
    return out if down_bias is None else add_bias_of_experts(out, down_bias, counts)  # once, after the sum


@untraced
def add_bias_of_experts(rows: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
    """``rows`` [rows, out], sorted by expert, plus the bias of each one's expert [experts, out]."""
    out: Tensor = _AddBias.apply(rows, bias, counts)
    return out


class _AddBias(torch.autograd.Function):
    """autograd's own gradient of the bias is ``index_add_``: on a GPU atomic additions in the dtype of the bias, which
    in bf16 stop at 256 equal rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts, ctx.dtype = counts, bias.dtype
        of_rows = numbers_on(rows.device, list(counts))
        return rows + bias.repeat_interleave(of_rows, 0, output_size=len(rows)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_bias = _sums_of_experts(gradient, ctx.counts, ctx.dtype) if needed_gradients(ctx)[1] else None
        return gradient, of_bias, None


def _sums_of_experts(rows: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The sum of each expert's rows, rounded once. Shape: [rows, out] -> [experts, out]."""
    sums = rows.new_zeros(len(counts), rows.shape[1], dtype=dtype)
    for expert, part in _ranges(counts):
        torch.sum(rows[part], 0, dtype=dtype, out=sums[expert])
    return sums


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(len(rows), weight.shape[2])
        for expert, part in _ranges(counts):
            if bias is None:
                torch.mm(rows[part], weight[expert], out=out[part])
            else:
                torch.addmm(bias[expert], rows[part], weight[expert], out=out[part])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_rows, for_weight, for_bias, _ = needed_gradients(ctx)
        of_rows = torch.empty_like(rows) if for_rows else None
        of_weight = torch.empty_like(weight) if for_weight else None
        of_bias = _sums_of_experts(gradient, ctx.counts, gradient.dtype) if for_bias else None
        if of_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    of_weight[expert].zero_()
        for expert, part in _ranges(ctx.counts):
            if of_rows is not None:
                torch.mm(gradient[part], weight[expert].t(), out=of_rows[part])
            if of_weight is not None:
                torch.mm(rows[part].t(), gradient[part], out=of_weight[expert])
        return of_rows, of_weight, of_bias, None


class _InFewBits(torch.autograd.Function):
    """Each expert's part as one linear layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Sequence[int], products: Products) -> Tensor:
        ctx.counts, ctx.products = counts, products
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(len(rows), weight.shape[2])
        for expert, part in _ranges(counts):
            out[part] = products.output(rows[part], weight[expert].t())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, *_ = needed_gradients(ctx)
        of_rows = torch.empty_like(rows) if for_rows else None
        of_weight = torch.zeros_like(weight) if for_weight else None
        for expert, part in _ranges(ctx.counts):
            if of_rows is not None:
                of_rows[part] = ctx.products.of_input(gradient[part], weight[expert].t())
            if of_weight is not None:
                of_weight[expert] = ctx.products.of_weight(gradient[part], rows[part]).t()
        return of_rows, of_weight, None, None


class _InOneKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], groups: GroupProducts
    ) -> Tensor:
        rows = rows.contiguous()
        ends = (counts if isinstance(counts, RowCounts) else RowCounts(counts)).ends(rows.device)
        ctx.groups = groups
        ctx.save_for_backward(rows, weight, ends)
        out = groups.output(rows, weight, ends)
        if bias is not None:
            expert_of = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
            out += bias[expert_of]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_rows, for_weight, for_bias, *_ = needed_gradients(ctx)
        of_rows = ctx.groups.of_input(gradient, weight, ends) if for_rows else None
        of_weight = None
        if for_weight and weight.stride(2) == 1:
            of_weight = ctx.groups.of_weight(rows, gradient, ends)
        elif for_weight:  # laid out as the weight is, where it is added up
            of_weight = ctx.groups.of_weight(gradient, rows, ends).transpose(1, 2)
        of_bias = None
        if for_bias:  # the kernel sums in a fixed order; 8 equal columns, because it wants 16 bytes
            of_bias = GROUPS_IN_BF16.of_weight(gradient.new_ones(len(rows), 8), gradient, ends)[:, 0]
        if capability(gradient) >= (10, 0):  # there the kernel leaves an expert without rows as it was allocated
            is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            if of_weight is not None:
                of_weight.masked_fill_(is_empty[:, None, None], 0)
            if of_bias is not None:
                of_bias.masked_fill_(is_empty[:, None], 0)
        return of_rows, of_weight, of_bias, None, None


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which these are."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


_BLOCK_NUMEL = 128 * 1024  # on a CPU: the elements that are gathered, scaled and summed before the next


def gather_rows(
    tokens: Tensor,
    token_of: Tensor,
    scale: Tensor | None,
    out: Tensor,
    dot_with: Tensor | None = None,
    *,
    may_miss: bool = False,
) -> Tensor | None:
    """Write the rows into ``out``; see the module.

    Args:
        tokens: [tokens, width].
        token_of, scale: [rows].
        out, dot_with: [rows, width].
        may_miss: a row may be of no token: its ``token_of`` is the number of tokens, and it is zeros.

    Returns: with ``dot_with``, the product of each row of it and the token, without scale. Shape: [rows].
    """
    sums = _sum_dtype(tokens.dtype, out.dtype)
    dots = None if dot_with is None else torch.empty(len(out), dtype=sums, device=out.device)
    is_moved = scale is None and dots is None and tokens.dtype == out.dtype and not may_miss
    if not is_moved and out.numel() and sums == torch.float32 and has_kernels(tokens, out):
        from shoal.kernels import expert_rows

        expert_rows.gather(tokens, token_of, scale, out, dot_with, dots)
    else:
        with nullcontext() if is_moved else one_kernel():
            _gather_in_blocks(with_zeros(tokens) if may_miss else tokens, token_of, scale, out, dot_with, dots)
    return dots


def _gather_in_blocks(
    tokens: Tensor, token_of: Tensor, scale: Tensor | None, out: Tensor, dot_with: Tensor | None, dots: Tensor | None
) -> None:
    sums = _sum_dtype(tokens.dtype, out.dtype)
    is_plain = tokens.dtype == out.dtype == sums or (scale is None and tokens.dtype == out.dtype)
    for block in _blocks(out):
        target = out[block]
        if is_plain:
            rows = torch.index_select(tokens, 0, token_of[block], out=target)
        else:
            rows = tokens.index_select(0, token_of[block]).to(sums)
        if dots is not None and dot_with is not None:
            torch.sum(rows * dot_with[block], 1, dtype=sums, out=dots[block])
        if scale is not None:
            rows.mul_(scale[block, None])
        if rows is not target:
            target.copy_(rows)


def sum_rows(rows: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor, *, may_miss: bool = False) -> None:
    """Write the sum of each token's rows into ``out``; see the module.

    Args:
        rows: [rows, width].
        row_of, weights: [tokens, k].
        out: [tokens, width].
        may_miss: a pair may have no row: its ``row_of`` is the number of rows, and it adds zeros.
    """
    if not row_of.numel():
        out.zero_()
    elif out.numel() and _sum_dtype(rows.dtype, out.dtype) == torch.float32 and has_kernels(rows, out):
        from shoal.kernels import expert_rows

        expert_rows.sum_of(rows, row_of, weights, out)
    else:
        with one_kernel():
            _sum_in_blocks(with_zeros(rows) if may_miss else rows, row_of, weights, out)


def with_zeros(rows: Tensor) -> Tensor:
    """A row of zeros after the others."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))


def _sum_in_blocks(rows: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor) -> None:
    sums = _sum_dtype(rows.dtype, out.dtype)
    for block in _blocks(out):
        target = out[block]
        total = target if out.dtype == sums else torch.empty_like(target, dtype=sums)
        for j in range(row_of.shape[1]):
            at = row_of[block, j]
            if j == 0 and rows.dtype == sums:
                torch.index_select(rows, 0, at, out=total)
            elif j == 0:
                total.copy_(rows.index_select(0, at))
            elif weights is None:
                total.add_(rows.index_select(0, at))
            else:
                total.addcmul_(rows.index_select(0, at), weights[block, j, None])
            if j == 0 and weights is not None:
                total.mul_(weights[block, 0, None])
        if total is not target:
            target.copy_(total)


def _sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtypes`` are summed."""
    return reduce(torch.promote_types, dtypes, torch.float32)


def _blocks(out: Tensor) -> Iterator[slice]:
    """Ranges of dim 0."""
    step = max(1, numel_at_once(out, _BLOCK_NUMEL) // max(1, out.shape[1]))
    for start in range(0, len(out), step):
        yield slice(start, min(start + step, len(out)))
