"""Rows of tokens in the order of experts, and their weighted sums in the order of tokens.

    gather   rows[i]   = scale[i] * tokens[token_of[i]]
    sum      tokens[t] = sum over j of weights[t, j] * rows[row_of[t, j]], in the order of j

Each is the other's gradient. Sums of 16-bit values are computed in fp32 and rounded once. On a CPU both work in blocks
that stay in the cache. There are no atomic additions, so results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_NUMEL = 128 * 1024  # on a CPU: the elements that are gathered, scaled and summed before the next


def gather_rows(
    tokens: Tensor, token_of: Tensor, scale: Tensor | None, out: Tensor, dot_with: Tensor | None = None
) -> Tensor | None:
    """Write the rows into ``out``; see the module.

    Args:
        tokens: [tokens, width].
        token_of, scale: [rows].
        out, dot_with: [rows, width].

    Returns: with ``dot_with``, the product of each row of it and the token, without scale. Shape: [rows].
    """
    sums = _sum_dtype(tokens.dtype, out.dtype)
    dots = None if dot_with is None else torch.empty(len(out), dtype=sums, device=out.device)
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
    return dots


def sum_rows(rows: Tensor, row_of: Tensor, weights: Tensor | None, out: Tensor) -> None:
    """Write the sum of each token's rows into ``out``; see the module.

    Args:
        rows: [rows, width]; with a row of zeros after them where pairs were dropped.
        row_of, weights: [tokens, k].
        out: [tokens, width].
    """
    if not row_of.numel():
        out.zero_()
        return
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
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _blocks(out: Tensor) -> Iterator[slice]:
    """Ranges of dim 0."""
    step = len(out) if out.device.type != "cpu" else max(1, _BLOCK_NUMEL // max(1, out.shape[1]))
    for start in range(0, len(out), max(1, step)):
        yield slice(start, min(start + step, len(out)))
