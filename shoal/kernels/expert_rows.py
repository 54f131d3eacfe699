"""Rows of tokens for experts, and their sums for tokens, in one pass over memory: ``shoal.parallel.expert.grouped``.

    gather    rows[i] = scale[i] * tokens[token_of[i]]; dots[i] = tokens[token_of[i]] . dot_with[i]
    sum       tokens[t] = sum over j of weights[t, j] * rows[row_of[t, j]]

    gather    reads the tokens and ``dot_with``, writes the rows
    sum       reads the rows, writes the tokens

A program has a row of the result. Values are computed in fp32, products and sums rounded one by one; the terms of a sum
are added in the order of j. A token or a row whose number is that of all of them is zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # elements of a row that a program has at a time


def gather(
    tokens: torch.Tensor,
    token_of: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    dot_with: torch.Tensor | None,
    dots: torch.Tensor | None,
) -> None:
    """As ``grouped.gather_rows``. ``dots``: gets its result, in fp32; shape [rows]."""
    tokens, other = _dense(tokens), None if dot_with is None else _dense(dot_with)
    _gather[(len(out),)](
        tokens, token_of, token_of if scale is None else scale, out, tokens if other is None else other,
        out if dots is None else dots, len(tokens), out.shape[1],
        tokens.stride(0), token_of.stride(0), 0 if scale is None else scale.stride(0), out.stride(0),
        0 if other is None else other.stride(0),
        HAS_SCALE=scale is not None, HAS_DOTS=other is not None, **_options(out.shape[1]),
    )  # fmt: skip


def sum_of(rows: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """As ``grouped.sum_rows``."""
    rows = _dense(rows)
    _sum[(len(out),)](
        rows, row_of, row_of if weights is None else weights, out, len(rows), out.shape[1],
        rows.stride(0), *row_of.stride(), *((0, 0) if weights is None else weights.stride()), out.stride(0),
        HAS_WEIGHTS=weights is not None, K=row_of.shape[1], **_options(out.shape[1]),
    )  # fmt: skip


def _dense(rows: torch.Tensor) -> torch.Tensor:
    """The elements of a row follow each other: a gradient may be one number, expanded."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _options(width: int) -> dict[str, int | bool]:
    return {"BLOCK": min(triton.next_power_of_2(width), _BLOCK), "num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _gather(
    tokens, token_of, scale, out, dot_with, dots, num_tokens, width,
    token_stride, token_of_stride, scale_stride, out_stride, dot_stride,
    HAS_SCALE: tl.constexpr, HAS_DOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of + row * token_of_stride)
    known = tl.where(token < num_tokens, width, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        exists = column < width
        values = tl.load(tokens + token * token_stride + column, mask=column < known, other=0.0).to(tl.float32)
        if HAS_DOTS:
            other = tl.load(dot_with + row * dot_stride + column, mask=exists, other=0.0)
            total += values * other.to(tl.float32)
        if HAS_SCALE:
            values = values * tl.load(scale + row * scale_stride).to(tl.float32)
        tl.store(out + row * out_stride + column, values.to(out.dtype.element_ty), mask=exists)
    if HAS_DOTS:
        tl.store(dots + row, tl.sum(total, axis=0))


@triton.jit
def _sum(
    rows, row_of, weights, out, num_rows, width,
    row_stride, row_of_stride, row_of_step, weight_stride, weight_step, out_stride,
    HAS_WEIGHTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        exists = column < width
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(K):
            row = tl.load(row_of + token * row_of_stride + j * row_of_step)
            known = tl.where(row < num_rows, width, 0)
            values = tl.load(rows + row * row_stride + column, mask=column < known, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                values = values * tl.load(weights + token * weight_stride + j * weight_step).to(tl.float32)
            total = total + values
        tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=exists)
