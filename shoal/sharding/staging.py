"""Staging buffers: acquired for one reduction and released after it, so that a step allocates nothing after the first.

A staging buffer is shared by all groups whose parameters lie alike, together with its views and its zeroed gaps. It is
not handed out again while peers read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.layout import BufferLayout
from shoal.sharding.placement import Placement
from shoal.streams import MemoryPool, allocating_in, is_accelerator, name_memory

MAX_BUFFERS = 4  # of one layout, before a rank waits for a slower one to have read the oldest
MAX_BUFFERS_ON_ACCELERATOR = 2  # there only the device waits


class StagingBuffers:
    """Staging buffers by layout and dtype.

    Args:
        pool: in which they are allocated; None: with all other memory.

    Memory: until ``clear()``, of each layout as many buffers as were ever in use at once, and up to ``MAX_BUFFERS``
    where as many groups lie alike.
    """

    def __init__(self, comm: Communicator, device: torch.device, *, pool: MemoryPool | None = None) -> None:
        self._comm = comm
        self._device = device
        self.pool = pool
        self._max_buffers = MAX_BUFFERS_ON_ACCELERATOR if is_accelerator(device) else MAX_BUFFERS
        self._free: dict[object, list[FlatBuffer]] = defaultdict(list)
        self._all: list[FlatBuffer] = []
        self._num_made: Counter[object] = Counter()
        self._num_users: Counter[object] = Counter()

    def register(self, layout: BufferLayout) -> None:
        """One more group of this layout will acquire buffers, one at a time and once in a backward pass."""
        self._num_users[layout.signature] += 1

    def acquire(self, layout: BufferLayout, dtype: torch.dtype) -> FlatBuffer:
        """A whole buffer of this layout; its parameters' values are whatever the last user left, gaps are zero."""
        key = (layout.signature, dtype)
        free = self._free[key]
        is_idle = bool(free) and free[0].reader is None
        if is_idle or (free and self._num_made[key] >= min(self._max_buffers, self._num_users[layout.signature])):
            buffer = free.pop(0)  # released longest ago: its reader is the likeliest to be done
            buffer.wait_for_reader()
            return buffer
        with allocating_in(self.pool):
            full = self._comm.empty(layout.numel, dtype, self._device)
        full = name_memory(full, "a staging buffer", "buffers in flight").zero_()
        buffer = FlatBuffer("staging", layout, dtype, self._device, self._comm, {}, Placement(), full=full)
        self._all.append(buffer)
        self._num_made[key] += 1
        return buffer

    def release(self, buffer: FlatBuffer, reader: Work | None = None) -> None:
        """Return a buffer, or be done with one of another's; ``reader``: the collective whose source it is."""
        buffer.reader = reader
        if buffer in self._all:
            self._free[buffer.layout.signature, buffer.dtype].append(buffer)
        else:
            buffer.wait_for_reader()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.full.nbytes for buffer in self._all)

    def clear(self) -> None:
        """Free every buffer."""
        self._free.clear()
        self._all.clear()
        self._num_made.clear()
