"""DeepSpeed's ``PartitionedTensor``, a tensor that is sharded over the ranks of a torch process group, and its
``reduce_scatter_coalesced``, which reduces several tensors in one collective over one.

rank 0   local_data  [0 1 2]          full()   [0 1 2 3 4 5 6 7] in the first tensor's shape, on each rank
rank 1               [3 4 5]
rank 2               [6 7]
to_meta()            number of dimensions, dimensions, ranks, this rank, where each range begins, the end

The script passes a process group of torch's, so torch's own collectives are called: no communicator of Shoal's has its
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UsageError


class PartitionedTensor:
    """This rank's range of a tensor that is equal on every rank of the group.

    ``partition_meta`` says where each rank's range begins, and the end; None: equal ranges, the first longer by one.

    Raises: UsageError: a partition that is not one of the tensor among the group's ranks.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: list[int] | None = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group=group), dist.get_rank(group=group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        size, longer = divmod(tensor.numel(), self.num_parts)
        even = [part * size + min(part, longer) for part in range(self.num_parts + 1)]
        self.partition = self._checked(even if partition_meta is None else list(partition_meta), tensor.numel())
        self.local_data = tensor.detach().reshape(-1)[self.partition[self.rank] : self.partition[self.rank + 1]].clone()

    def _checked(self, partition: list[int], numel: int) -> list[int]:
        is_one = len(partition) == self.num_parts + 1 and partition[0] == 0 and partition[-1] == numel
        if not is_one or partition != sorted(partition):
            raise UsageError(
                f"{partition} does not split {numel} elements into {self.num_parts} ranges.",
                do="give where each rank's begins, from 0, and the end.",
                code="partitioned-tensor",
            )
        return partition

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """The same object from ``to_meta()`` and ``data()``, on the same rank. Raises: UsageError: another rank's."""
        numbers = [int(number) for number in meta.tolist()]
        dimensions, others = numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
        made = cls(local_part.new_empty(0), group)
        if others[:2] != [made.num_parts, made.rank]:
            raise UsageError(
                f"the description is of rank {others[1]} of {others[0]}, this is rank {made.rank} of {made.num_parts}.",
                do="send each rank its own.",
                code="partitioned-tensor",
            )
        made.orig_size, made.local_data = dimensions, local_part.detach()
        made.orig_device = local_part.device if device is None else torch.device(device)
        made.partition = made._checked(others[2:], math.prod(dimensions))
        return made

    def full(self, device: Any = None) -> torch.Tensor:
        """The whole tensor, in its first shape. Every rank calls. Communicates: an all_gather."""
        longest = max(end - begin for begin, end in zip(self.partition, self.partition[1:], strict=False))
        mine = self.local_data.new_zeros(longest)
        mine[: self.local_data.numel()].copy_(self.local_data)
        parts = [torch.empty_like(mine) for _ in range(self.num_parts)]
        dist.all_gather(parts, mine, group=self.group)
        bounds = zip(self.partition, self.partition[1:], strict=False)
        whole = torch.cat([part[: end - begin] for part, (begin, end) in zip(parts, bounds, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> torch.Tensor:
        """The description for ``from_meta``. Shape: [dimensions + ranks + 4], int64."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """This rank's range, 1-D."""
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.shape

    def full_size(self) -> list[int]:
        return self.orig_size


def reduce_scatter_coalesced(tensors: Sequence[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """This rank's range of the mean of each tensor over the ranks: of 5 elements on 2 ranks, rank 0 gets 0 to 2.

    The tensors have one dtype and device, and the same shapes on every rank.

    Returns: 1-D, ceil(numel / ranks) elements of each; the last ranks may have fewer, or none.
    Communicates: one reduce_scatter of all of them, padded.
    """
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    lengths = [-(-tensor.numel() // size) for tensor in tensors]
    rows = torch.cat([_rows(tensor, length, size) for tensor, length in zip(tensors, lengths, strict=True)], dim=1)
    mine = rows.new_empty(rows.shape[1])
    dist.reduce_scatter_tensor(mine, rows.div_(size).view(-1), group=group)
    parts = mine.split(lengths)
    counts = [
        min(max(tensor.numel() - rank * length, 0), length) for tensor, length in zip(tensors, lengths, strict=True)
    ]
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _rows(tensor: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """The tensor with a row for each rank. Shape: [size, length]."""
    rows = tensor.new_zeros(size * length)
    rows[: tensor.numel()].copy_(tensor.detach().reshape(-1))
    return rows.view(size, length)
