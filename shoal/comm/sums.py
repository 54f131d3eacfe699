"""The one sum that every reduction uses: in rank order, in fp32, scaled, rounded once.

    out = round(scale * (((part 0 + part 1) + part 2) + ...))                    all in fp32 (fp64 for fp64 parts)
    out = round(out + scale * (((part 0 + part 1) + part 2) + ...))              with ``accumulate``

The order is fixed, so the bits depend neither on which rank computes a range nor on how the parts came there.

On CPU the sum is bound by memory: it runs in blocks whose fp32 scratch stays in cache, so that each part is read once
and ``out`` is written once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

BLOCK_NUMEL = 512 * 1024  # 2 MiB of fp32 scratch: stays in cache, and the calls between blocks do not count


class RankOrderedSum:
    """Sums tensors; reuses its scratch between calls. Belongs to one thread.

    Memory: one block of 2 MiB on the host once a large sum on CPU was taken.
    """

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def __call__(
        self, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> torch.Tensor:
        """Write the scaled sum of ``parts`` to ``out`` (or add it) and return ``out``.

        Args:
            parts: one tensor a rank, in rank order; 1-D, of one numel and dtype.
            out: 1-D, of the same numel; may be any one of the parts.
        """
        if len(parts) == 1 and scale == 1.0 and not accumulate and is_same_memory(parts[0], out):
            return out
        with torch.no_grad():
            if len(parts) == 1 and scale == 1.0 and not accumulate:
                return out.copy_(parts[0])
            if _is_pair_exact(parts, out, scale, accumulate=accumulate):
                torch.add(parts[0], parts[1], out=out)
                return out if scale == 1.0 else out.mul_(scale)
            sum_dtype = _sum_dtype(parts[0].dtype)
            numel = out.numel()
            if out.device.type != "cpu" or isinstance(out, FakeTensor) or numel <= 1024:
                _sum_into(parts, out, torch.empty_like(out, dtype=sum_dtype), scale, accumulate)
                return out
            total = self._scratch.get(sum_dtype)
            if total is None:
                total = self._scratch[sum_dtype] = torch.empty(BLOCK_NUMEL, dtype=sum_dtype, device="cpu")
            for start in range(0, numel, BLOCK_NUMEL):
                end = min(start + BLOCK_NUMEL, numel)
                block = [part[start:end] for part in parts]
                _sum_into(block, out[start:end], total[: end - start], scale, accumulate)
        return out


def _sum_into(
    parts: Sequence[torch.Tensor], out: torch.Tensor, total: torch.Tensor, scale: float, accumulate: bool
) -> None:
    rest = parts[1:]
    if rest and parts[0].dtype == total.dtype:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    else:
        total.copy_(parts[0])
    for part in rest:
        total.add_(part)  # a 16-bit part is converted to the dtype of total first
    if accumulate:
        if scale != 1.0:
            total.mul_(scale)
        if out.dtype == total.dtype:
            out.add_(total)
        else:
            out.copy_(total.add_(out))
    elif scale != 1.0 and out.dtype == total.dtype:
        torch.mul(total, scale, out=out)
    else:
        out.copy_(total if scale == 1.0 else total.mul_(scale))


def _is_pair_exact(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, *, accumulate: bool) -> bool:
    """True if torch's own bf16 addition gives the same bits, in half the time.

    It adds in fp32 and rounds once; a power of two then changes the exponent alone, whose range is fp32's. (fp16
    could overflow before it is scaled down.)
    """
    is_bf16 = len(parts) == 2 and parts[0].dtype is torch.bfloat16 and out.dtype is torch.bfloat16
    return is_bf16 and not accumulate and out.device.type == "cpu" and math.frexp(scale)[0] == 0.5


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 or not dtype.is_floating_point else torch.float32


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both tensors are at one address; in a dry run, which has none, at one place of a storage."""
    if one is other:
        return True
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        places = [(each.untyped_storage()._cdata, each.storage_offset(), each.dtype) for each in (one, other)]
        return places[0] == places[1]
    return one.data_ptr() == other.data_ptr() and one.device == other.device and one.dtype == other.dtype
