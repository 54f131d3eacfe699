"""Staging buffers: acquired for one reduction and released after it, so that a step allocates nothing after the first.

A staging buffer is shared by all groups whose parameters lie alike, together with its views and its zeroed gaps. It is
not handed out again while peers read it. A shard buffer holds a reduced gradient until it has been copied to the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.memory.stream_copies import CopyDone
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.layout import BufferLayout
from shoal.sharding.placement import Placement
from shoal.streams import is_accelerator

MAX_BUFFERS = 4  # of one layout, before a rank waits for a slower one to have read the oldest
MAX_BUFFERS_ON_ACCELERATOR = 2  # there only the device waits
MAX_SHARDS = 2  # of one size: while one is copied to the host, the next is reduced into; over ranks, two are


class StagingBuffers:
    """Staging buffers by layout and dtype.

    Args:
        max_buffers: of one layout, before one that peers may still read is waited for; None: by ``device``.

    Memory: until ``clear()``, of each layout as many buffers as were ever in use at once, and up to ``max_buffers``
    where as many groups lie alike.
    """

    def __init__(self, comm: Communicator, device: torch.device, max_buffers: int | None = None) -> None:
        self._comm = comm
        self._device = device
        self._max_buffers = max_buffers or (MAX_BUFFERS_ON_ACCELERATOR if is_accelerator(device) else MAX_BUFFERS)
        self._free: dict[object, list[FlatBuffer]] = defaultdict(list)
        self._all: list[FlatBuffer] = []
        self._num_made: Counter[object] = Counter()
        self._num_users: Counter[object] = Counter()
        self.shards = ShardBuffers(device, MAX_SHARDS + (comm.size > 1))

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
        full = self._comm.empty(layout.numel, dtype, self._device).zero_()
        buffer = FlatBuffer("staging", layout, dtype, self._device, self._comm, {}, Placement(), full=full)
        self._all.append(buffer)
        self._num_made[key] += 1
        return buffer

    def release(self, buffer: FlatBuffer, reader: Work | None = None) -> None:
        """Return a buffer; ``reader``: the collective whose source it is."""
        buffer.reader = reader
        self._free[buffer.layout.signature, buffer.dtype].append(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(buffer.full.nbytes for buffer in self._all) + self.shards.nbytes

    def clear(self) -> None:
        """Free every buffer."""
        self._free.clear()
        self._all.clear()
        self._num_made.clear()
        self.shards.clear()


class ShardBuffers:
    """Device memory for reduced gradients that are stored on the host.

    Memory: until ``clear()``, of each size and dtype ``max_shards`` buffers, or as many as were in use at once.
    """

    def __init__(self, device: torch.device, max_shards: int = MAX_SHARDS) -> None:
        self._device = device
        self._max_shards = max_shards
        self._free: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, CopyDone]]] = defaultdict(deque)
        self._num_made: Counter[tuple[int, torch.dtype]] = Counter()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of arbitrary values. Order: the current stream waits for the copy of the values before."""
        free = self._free[numel, dtype]
        if free and self._num_made[numel, dtype] >= self._max_shards:
            flat, copied = free.popleft()
            copied.wait()
            return flat
        self._num_made[numel, dtype] += 1
        return torch.empty(numel, dtype=dtype, device=self._device)

    def release(self, flat: torch.Tensor, copied: CopyDone) -> None:
        """Return a buffer, from which ``copied`` is the last copy."""
        self._free[flat.numel(), flat.dtype].append((flat, copied))

    def discard(self, flat: torch.Tensor) -> None:
        """Drop a buffer: what reads it may not be known."""
        self._num_made[flat.numel(), flat.dtype] -= 1

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(numel * dtype.itemsize * number for (numel, dtype), number in self._num_made.items())

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        for key, free in self._free.items():
            self._num_made[key] -= len(free)
        self._free.clear()
