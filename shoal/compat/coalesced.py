"""DeepSpeed's ``reduce_scatter_coalesced``: several tensors in one collective over a torch process group.

tensor of 5 elements, 2 ranks     rank 0 gets the mean of elements 0 to 2, rank 1 that of elements 3 and 4

The script passes a process group of torch's, so torch's own collective is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """This rank's range of the mean of each tensor over the ranks.

    Args:
        tensors: of one dtype and device; any shapes, the same on every rank.

    Returns: 1-D, ceil(numel / ranks) elements of each; the last ranks may have fewer, or none.
    Communicates: one reduce_scatter of all of them, padded.
    """
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    lengths = [-(-tensor.numel() // size) for tensor in tensors]
    rows = torch.cat([_rows(tensor, length, size) for tensor, length in zip(tensors, lengths, strict=True)], dim=1)
    own = rows.new_empty(rows.shape[1])
    dist.reduce_scatter_tensor(own, rows.div_(size).view(-1), group=group)
    parts = own.split(lengths)
    counts = [
        min(max(tensor.numel() - rank * length, 0), length) for tensor, length in zip(tensors, lengths, strict=True)
    ]
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _rows(tensor: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """The tensor with a row for each rank. Shape: [size, length]."""
    rows = tensor.new_zeros(size * length)
    rows[: tensor.numel()].copy_(tensor.detach().reshape(-1))
    return rows.view(size, length)
