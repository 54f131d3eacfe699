"""Buffers on a disk: read ahead of their use and written behind it, a few of them in memory at a time.

    buffer = store.allocate("layers.3", nbytes)    an extent on the disk, and memory to fill
    store.store(buffer)                            begin to write it; its memory is reused afterwards
    store.start_fetch(buffer)                      begin to read it
    store.fetch(buffer)                            wait until it is in memory: ``buffer.memory``
    store.discard(buffer)                          free the memory of an unchanged buffer

Of a buffer that is only read, some ranges can be read in place of all.

Source: ZeRO-Infinity (arXiv:2104.07857), sections 5.2.2 and 6.2: disk and computation overlap, buffers are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shoal.comm.side_stream import CopyDone
from shoal.memory.disk import DiskTier
from shoal.memory.host import PAGE, round_up
from shoal.memory.io_threads import Ticket
from shoal.memory.stream_copies import mark
from shoal.memory.transfer import FileExtent, Intervals
from shoal.streams import is_accelerator

_MAX_WRITES = 2  # under way, before the next one waits


@dataclass(eq=False)
class DiskBuffer:
    """One buffer of a ``DiskStore``, on the disk or in memory."""

    name: str
    extent: FileExtent | None = None
    memory: torch.Tensor | None = None  # [nbytes, in whole pages] uint8, while it is resident or being read
    reads: list[Ticket] = field(default_factory=list)
    is_resident: bool = False  # all of it
    fetched: Intervals = field(default_factory=Intervals)  # bytes that were read, or are being read
    pin_count: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.extent is None else self.extent.nbytes


class DiskStore:
    """Buffers on one disk tier.

    Args:
        name: prefix of the buffers' names, so that stores can share a tier.
        device: that copies from and to the buffers' memory.
        max_ahead: buffers, and bytes of buffers, that may be in memory when one more is read ahead; None: the caller
            limits it. A buffer that is needed now is always read.
        is_pinned: page-lock the memory.

    Memory: of the buffers in memory, and what is kept for the next buffer of the same size; with ``max_ahead`` at most
        its bytes and what is needed now.
    """

    def __init__(
        self,
        tier: DiskTier,
        name: str,
        *,
        device: torch.device | None = None,
        max_ahead: tuple[int, int] | None = None,
        is_pinned: bool = False,
    ) -> None:
        self.tier = tier
        self.name = name
        self._device = device if device is not None else torch.device("cpu")
        self._max_ahead = max_ahead
        self._is_pinned = is_pinned and is_accelerator(self._device)
        self._writes: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._free: dict[int, list[tuple[torch.Tensor, CopyDone]]] = {}  # by size, with the last copy from it
        self._free_nbytes = 0
        self._num_used = 0
        self._used_nbytes = 0

    @property
    def host_nbytes(self) -> int:
        """Bytes of memory, in use or kept."""
        return self._used_nbytes + self._free_nbytes

    def allocate(self, name: str, nbytes: int) -> DiskBuffer:
        """A new buffer, resident, zero. Raises: OutOfMemoryError, TierError."""
        buffer = DiskBuffer(name)
        self.resize(buffer, nbytes)
        buffer.is_resident = True
        return buffer

    def resize(self, buffer: DiskBuffer, nbytes: int) -> torch.Tensor | None:
        """Give a resident buffer another size; its values are zero.

        Returns: the old memory, to copy from and then to ``release_memory``.
        """
        if buffer.extent is not None and buffer.nbytes != nbytes:
            self.tier.free(buffer.extent)
            buffer.extent = None
        if buffer.extent is None and nbytes:
            buffer.extent = self.tier.allocate(f"{self.name}: {buffer.name}", nbytes)
        old, buffer.memory = buffer.memory, self._acquire_memory(nbytes).zero_() if nbytes else None
        return old

    def can_fetch_ahead(self, nbytes: int) -> bool:
        """True if this many bytes may be read ahead of their use."""
        if self._max_ahead is None:
            return True
        while self._writes and self._writes[0][0].is_done:
            self._finish_write()
        count, limit = self._max_ahead
        return self._num_used < count and self._used_nbytes + round_up(nbytes, PAGE) <= limit

    def start_fetch(self, buffer: DiskBuffer, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Begin to read what has not been read. Does not block the host.

        Args:
            ranges: of bytes (start, stop), of which whole pages are read; None: all of it.
        """
        if buffer.is_resident or buffer.extent is None:
            return
        if buffer.memory is None:
            buffer.memory = self._acquire_memory(buffer.nbytes)
        for low, high in ((0, buffer.nbytes),) if ranges is None else ranges:
            start, stop = low // PAGE * PAGE, min(round_up(high, PAGE), buffer.nbytes)
            for missing_start, missing_stop in buffer.fetched.missing(start, stop):
                memory = buffer.memory[missing_start:missing_stop]
                buffer.reads.append(self.tier.read(buffer.extent, memory, missing_start))
            buffer.fetched.add(start, stop)

    def fetch(self, buffer: DiskBuffer, ranges: Sequence[tuple[int, int]] | None = None) -> bool:
        """Have these ranges of it in memory; None: make it resident.

        Returns: True if it was on the disk. Raises: TierError: it could not be read.
        """
        if buffer.is_resident:
            return False
        self.start_fetch(buffer, ranges)
        self._wait_reads(buffer)
        buffer.is_resident = ranges is None
        return True

    def _wait_reads(self, buffer: DiskBuffer) -> None:
        reads, buffer.reads = buffer.reads, []
        errors = []
        for ticket in reads:
            try:
                ticket.wait()
            except BaseException as error:
                errors.append(error)
        if errors:
            self.discard(buffer)  # the next fetch reads again
            raise errors[0]

    def zero(self, buffer: DiskBuffer) -> None:
        """Make it resident with zeros, without reading it: the caller overwrites all of it."""
        if buffer.is_resident:
            return
        if buffer.memory is not None:
            self.fetch(buffer)
            buffer.memory.zero_()
        elif buffer.extent is not None:
            buffer.memory = self._acquire_memory(buffer.nbytes)
            buffer.memory.zero_()
        buffer.is_resident = True

    def store(self, buffer: DiskBuffer) -> None:
        """Begin to write it. Its memory, into which every copy has ended, is reused after that.

        Raises: TierError: an earlier write failed.
        """
        if buffer.extent is not None and buffer.memory is not None:
            ticket = self.tier.write(buffer.extent, buffer.memory[: buffer.nbytes])
            self._writes.append((ticket, buffer.memory))
            buffer.memory = None
            buffer.is_resident = False
            buffer.fetched = Intervals()
        while len(self._writes) > _MAX_WRITES:
            self._finish_write()

    def discard(self, buffer: DiskBuffer) -> None:
        """Free the memory of an unchanged buffer, once the copies from it have ended."""
        if buffer.extent is not None and buffer.memory is not None:
            self.release_memory(buffer.memory)
            buffer.memory = None
            buffer.is_resident = False
            buffer.fetched = Intervals()

    def synchronize(self) -> None:
        """Wait until all writes have ended. Raises: TierError."""
        while self._writes:
            self._finish_write()

    def close(self) -> None:
        """Remove the files of the whole tier, and free the memory. Idempotent."""
        self._writes.clear()
        self._free.clear()
        self._free_nbytes = self._num_used = self._used_nbytes = 0
        self.tier.close()

    # memory

    def _acquire_memory(self, nbytes: int) -> torch.Tensor:
        size = round_up(nbytes, PAGE)
        if not self._free.get(size):
            self._reclaim(size)
        free = self._free.get(size)
        self._num_used += 1
        self._used_nbytes += size
        if free:
            memory, done = free.pop()
            done.block()
            self._free_nbytes -= size
            return memory
        if self._max_ahead is not None and self.host_nbytes > self._max_ahead[1]:
            self._free.clear()  # of other sizes
            self._free_nbytes = 0
        return self.tier.memory(size, is_pinned=self._is_pinned)

    def _reclaim(self, size: int) -> None:
        """Free the memory of a buffer of this size whose write has ended."""
        for index, (ticket, memory) in enumerate(self._writes):
            if memory.numel() == size and ticket.is_done:
                del self._writes[index]
                ticket.wait()
                self.release_memory(memory)
                return

    def release_memory(self, memory: torch.Tensor) -> None:
        """Keep memory for the next buffer of its size."""
        self._free.setdefault(memory.numel(), []).append((memory, mark(self._device)))
        self._num_used -= 1
        self._used_nbytes -= memory.numel()
        self._free_nbytes += memory.numel()

    def _finish_write(self) -> None:
        ticket, memory = self._writes.popleft()
        try:
            ticket.wait()
        finally:
            self.release_memory(memory)
