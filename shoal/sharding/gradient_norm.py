"""Sums of squares of gradients: this rank's part of the global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.streams import is_in_host_memory

NORM_BLOCK_NUMEL = 1 << 17  # 512 KiB of fp32


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a 1-D tensor, in fp32 (fp64 for fp64). Shape: [].

    A 16-bit tensor on CPU is converted block by block, in cache: a norm that converts as it reads takes twice as long.
    """
    if not is_in_host_memory(flat) or flat.dtype not in (torch.float16, torch.bfloat16):
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    else:
        parts = [torch.linalg.vector_norm(block.float()) for block in flat.split(NORM_BLOCK_NUMEL)]
        norm = torch.linalg.vector_norm(torch.stack(parts))
    return norm * norm


def sums_of_squares(flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``sum_of_squares`` of each; on an accelerator in one kernel for all of a dtype. Shape of each: []."""
    if not flats or is_in_host_memory(flats[0]):
        return [sum_of_squares(flat) for flat in flats]
    squares = [torch.zeros((), dtype=torch.float32, device=flat.device) if not flat.numel() else flat for flat in flats]
    for dtype in {flat.dtype for flat in flats if flat.numel()}:
        places = [index for index, flat in enumerate(flats) if flat.dtype == dtype and flat.numel()]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm([flats[index] for index in places], 2, dtype=wide)
        for index, square in zip(places, torch._foreach_mul(norms, norms), strict=True):
            squares[index] = square
    return squares
