"""The one sum that every reduction uses: in rank order, in fp32, scaled, rounded once.

    out = round(scale * (((piece 0 + piece 1) + piece 2) + ...))                    all in fp32 (fp64 for fp64 pieces)
    out = round(out + scale * (((piece 0 + piece 1) + piece 2) + ...))              with ``accumulate``

The order is fixed, so the bits depend neither on which rank computes a range nor on how the pieces came there.

On CPU the sum is bound by memory: it runs in blocks whose fp32 scratch stays in cache, so that each piece is read once
and ``out`` is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

BLOCK_NUMEL = 256 * 1024  # 1 MiB of fp32 scratch: fits a core's cache, and 64 blocks cover 64 MiB


class RankOrderedSum:
    """Sums pieces; keeps its scratch between calls. Belongs to one thread.

    Memory: two blocks of 1 MiB on the host once a sum on CPU was taken.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, pieces: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> torch.Tensor:
        """Write the scaled sum of ``pieces`` to ``out`` (or add it) and return ``out``.

        Args:
            pieces: one tensor a rank, in rank order; 1-D, of one numel and dtype.
            out: 1-D, of the same numel; may be any one of the pieces.
        """
        sum_dtype = _sum_dtype(pieces[0].dtype)
        if len(pieces) == 1 and scale == 1.0 and not accumulate and is_same_memory(pieces[0], out):
            return out
        with torch.no_grad():
            if len(pieces) == 1 and scale == 1.0 and not accumulate:
                return out.copy_(pieces[0])
            numel = out.numel()
            if out.device.type != "cpu" or isinstance(out, FakeTensor) or numel <= 1024:
                _sum_into(
                    pieces, out, torch.empty_like(out, dtype=sum_dtype), torch.empty_like(out, dtype=sum_dtype), scale,
                    accumulate,
                )  # fmt: skip
                return out
            if sum_dtype not in self._scratch:
                self._scratch[sum_dtype] = (
                    torch.empty(BLOCK_NUMEL, dtype=sum_dtype),
                    torch.empty(BLOCK_NUMEL, dtype=sum_dtype),
                )
            total, term = self._scratch[sum_dtype]
            for start in range(0, numel, BLOCK_NUMEL):
                end = min(start + BLOCK_NUMEL, numel)
                block = [piece[start:end] for piece in pieces]
                _sum_into(block, out[start:end], total[: end - start], term[: end - start], scale, accumulate)
        return out


def _sum_into(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    total: torch.Tensor,
    term: torch.Tensor,
    scale: float,
    accumulate: bool,
) -> None:
    rest = pieces[1:]
    if rest and pieces[0].dtype == total.dtype:
        torch.add(pieces[0], pieces[1], out=total)
        rest = pieces[2:]
    else:
        total.copy_(pieces[0])
    for piece in rest:
        # A mixed addition converts element by element; converting the block first is vectorised.
        total.add_(piece if piece.dtype == total.dtype else term.copy_(piece))
    if scale != 1.0:
        if not accumulate and out.dtype == total.dtype:
            torch.mul(total, scale, out=out)
            return
        total.mul_(scale)
    if accumulate:
        if out.dtype == total.dtype:
            out.add_(total)
            return
        total.add_(out if out.dtype == total.dtype else term.copy_(out))
    out.copy_(total)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    return torch.float32


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do both tensors lie at one address? In a dry run there are no addresses: then only if they are one object."""
    if one is other:
        return True
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return False
    return one.data_ptr() == other.data_ptr() and one.device == other.device and one.dtype == other.dtype
