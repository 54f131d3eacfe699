"""The output of a tile of attention merged with that of earlier tiles, in one pass over memory.

    lse      log(exp(lse) + exp(lse of the tile))
    total    exp(old lse - lse) * total + exp(lse of the tile - lse) * out of the tile

    reads    4 bytes an element of the total, and the tile's 2 or 4
    writes   4

A program has some queries of one head. The tile is read as its kernel wrote it: see ``shoal.parallel.sequence.chunks``
for reversed ones and those of several blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMEL = 4096  # elements of a program


def merge(
    total: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, of_tile: torch.Tensor, num_blocks: int, is_reversed: bool
) -> None:
    """Update ``total`` and ``lse`` in place.

    Args:
        total, lse: [B, H, L, F] and [B, H, L], fp32.
        out, of_tile: of the tile; [B * num_blocks, H, L / num_blocks, F], and without F in fp32.
    """
    rows, heads, length, size = total.shape
    padded = triton.next_power_of_2(size)
    queries = max(min(_NUMEL // padded, triton.next_power_of_2(length)), 1)
    out = out if out.stride(3) == 1 else out.contiguous()
    _merge[(rows * heads * triton.cdiv(length, queries),)](
        total, lse, out, of_tile, heads, length, size, num_blocks,
        *total.stride()[:3], *lse.stride(), *out.stride()[:3], *of_tile.stride(),
        IS_REVERSED=is_reversed, QUERIES=queries, PADDED=padded, num_warps=8,
    )  # fmt: skip


@triton.jit
def _merge(
    total, lse, out, of_tile, heads, length, size, num_blocks,
    total_row, total_head, total_query, lse_row, lse_head, lse_query,
    out_row, out_head, out_query, tile_row, tile_head, tile_query,
    IS_REVERSED: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    per_head = tl.cdiv(length, QUERIES)
    which = tl.program_id(0).to(tl.int64) // per_head
    row, head = which // heads, which % heads
    query = tl.program_id(0).to(tl.int64) % per_head * QUERIES + tl.arange(0, QUERIES)
    exists = query < length
    per_block = length // num_blocks
    row_of_tile, place = row * num_blocks + query // per_block, query % per_block
    if IS_REVERSED:
        place = per_block - 1 - place
    at_lse = lse + row * lse_row + head * lse_head + query * lse_query
    before = tl.load(at_lse, mask=exists, other=0.0)
    new = tl.load(of_tile + row_of_tile * tile_row + head * tile_head + place * tile_query, mask=exists, other=0.0)
    top = tl.maximum(before, new)
    old_part, new_part = tl.exp(before - top), tl.exp(new - top)
    both = old_part + new_part
    column = tl.arange(0, PADDED)
    is_value = exists[:, None] & (column[None, :] < size)
    at_total = total + row * total_row + head * total_head + query[:, None] * total_query + column[None, :]
    at_out = out + row_of_tile[:, None] * out_row + head * out_head + place[:, None] * out_query + column[None, :]
    values = tl.load(at_total, mask=is_value, other=0.0) * (old_part / both)[:, None]
    values += tl.load(at_out, mask=is_value, other=0.0).to(tl.float32) * (new_part / both)[:, None]
    # Several warps read the log-sum-exp of a query, and one of them writes it: all must have read it before.
    tl.debug_barrier()
    tl.store(at_lse, top + tl.log(both), mask=exists)
    tl.store(at_total, values, mask=is_value)
