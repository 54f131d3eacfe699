"""Buffers that are taken for a moment and given back, so that a step allocates nothing after the first.

A buffer is shared by all buckets that lie alike, together with its views and its zeroed gaps. A buffer that a
collective still reads is not handed out again before that collective is drained.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.memory.layout import BucketLayout

RING = 4  # slabs of one layout that are made before a rank waits for a slower one to have read the oldest


@dataclass
class Slab:
    """A flat buffer with one view per parameter of its layout. Gaps and padding are zero, always."""

    flat: torch.Tensor  # [layout.numel]
    views: list[torch.Tensor]
    reader: Work | None = field(default=None)


class Pool:
    """Slabs by layout and dtype.

    Memory: until ``clear()``, of each layout as many slabs as were ever out at once, and up to ``RING`` where as many
    buckets lie alike.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._free: dict[object, list[Slab]] = defaultdict(list)
        self._all: list[Slab] = []
        self._num_made: Counter[object] = Counter()
        self._num_buckets: Counter[object] = Counter()

    def expect(self, layout: BucketLayout) -> None:
        """One more bucket of this layout will take slabs, one at a time and once in a backward pass."""
        self._num_buckets[layout.signature] += 1

    def take(self, layout: BucketLayout, dtype: torch.dtype) -> Slab:
        """A slab of this layout; its parameters' values are whatever the last user left."""
        key = (layout.signature, dtype)
        free = self._free[key]
        is_idle = bool(free) and free[0].reader is None
        if is_idle or (free and self._num_made[key] >= min(RING, self._num_buckets[layout.signature])):
            slab = free.pop(0)  # the one given back longest ago: its reader is the likeliest to be done
            if slab.reader is not None:
                slab.reader.drain()
                slab.reader = None
            return slab
        flat = self._comm.empty(layout.numel, dtype, self._device)
        flat.zero_()
        views = [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
        slab = Slab(flat, views)
        self._all.append(slab)
        self._num_made[key] += 1
        return slab

    def give_back(self, layout: BucketLayout, slab: Slab, reader: Work | None = None) -> None:
        """Return a slab; ``reader``: the collective whose source it is."""
        slab.reader = reader
        self._free[layout.signature, slab.flat.dtype].append(slab)

    @property
    def nbytes(self) -> int:
        return sum(slab.flat.numel() * slab.flat.element_size() for slab in self._all)

    def clear(self) -> None:
        """Forget every slab."""
        self._free.clear()
        self._all.clear()
        self._num_made.clear()
