"""A shelf on a disk: bytes that are read ahead of their use and written behind it, a few of them in memory at a time.

    place = shelf.make("layers.3", nbytes)    room on the disk, and a buffer to fill
    shelf.put_away(place)                     on its way to the disk; its buffer will be another's
    shelf.start_fetch(place)                  on its way back
    shelf.bring(place)                        here: ``place.buffer``
    shelf.let_go(place)                       nothing was changed: only the buffer is given back

Source: ZeRO-Infinity (arXiv:2104.07857), sections 5.2.2 and 6.2: disk and computation overlap, buffers are used again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from shoal.memory.aligned import PAGE, aligned_empty, round_up
from shoal.memory.disk import DiskTier
from shoal.memory.io_threads import Ticket
from shoal.memory.stream_copies import CopyDone, mark
from shoal.memory.transfer import Extent

_BEHIND = 2  # what may still be on its way to the disk before the next one waits


@dataclass(eq=False)
class Place:
    """One thing on a shelf, wherever it is now."""

    name: str
    extent: Extent | None = None
    buffer: torch.Tensor | None = None  # [nbytes, in whole pages] uint8, while it is in memory or on its way
    read: Ticket | None = None
    is_here: bool = False
    num_holders: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.extent is None else self.extent.nbytes


class Shelf:
    """Places on one tier.

    Args:
        name: of the shelf; the names of its places begin with it, so that shelves can share a tier.
        device: that copies from and to the buffers.
        max_ahead: buffers, and bytes of buffers, that may be out when one more is read ahead; None: the caller knows.
            What is needed now is read whatever is out.
        is_pinned: page-lock the buffers.

    Memory: the buffers that are out, and those that were and are kept for the next of their size; with ``max_ahead``
        at most its bytes and what is needed now.
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
        self._is_pinned = is_pinned and self._device.type != "cpu"
        self._writes: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._free: dict[int, list[tuple[torch.Tensor, CopyDone]]] = {}  # by size, with the last copy out of it
        self._free_nbytes = 0
        self._num_out = 0
        self._out_nbytes = 0

    @property
    def host_nbytes(self) -> int:
        """Bytes of the buffers, in use or kept."""
        return self._out_nbytes + self._free_nbytes

    def make(self, name: str, nbytes: int) -> Place:
        """A new place, here, its bytes zero. Raises: OutOfMemoryError, TierError."""
        place = Place(name)
        self.resize(place, nbytes)
        place.is_here = True
        return place

    def resize(self, place: Place, nbytes: int) -> torch.Tensor | None:
        """Room for ``nbytes``, zero, in the place of what it was.

        Returns: the old buffer, to copy from and then to ``give_back``.
        """
        if place.extent is not None and place.nbytes != nbytes:
            self.tier.free(place.extent)
            place.extent = None
        if place.extent is None and nbytes:
            place.extent = self.tier.allocate(f"{self.name}: {place.name}", nbytes)
        old, place.buffer = place.buffer, self._take(nbytes).zero_() if nbytes else None
        return old

    def can_fetch_ahead(self, nbytes: int) -> bool:
        """Is there room to read so much ahead of its use?"""
        if self._max_ahead is None:
            return True
        while self._writes and self._writes[0][0].is_done:
            self._finish_write()
        count, limit = self._max_ahead
        return self._num_out < count and self._out_nbytes + round_up(nbytes, PAGE) <= limit

    def start_fetch(self, place: Place) -> None:
        """Begin to read. Returns at once."""
        if place.is_here or place.buffer is not None or place.extent is None:
            return
        place.buffer = self._take(place.nbytes)
        place.read = self.tier.read(place.extent, place.buffer[: place.nbytes])

    def bring(self, place: Place) -> bool:
        """Have it in memory. Returns: was it on the disk? Raises: TierError: it could not be read."""
        if place.is_here:
            return False
        self.start_fetch(place)
        if place.read is not None:
            ticket, place.read = place.read, None
            try:
                ticket.wait()
            except BaseException:
                self.let_go(place)  # the next one reads again
                raise
        place.is_here = True
        return True

    def blank(self, place: Place) -> None:
        """Have zeros in memory, which will be written whole: spares the read."""
        if place.is_here:
            return
        if place.buffer is not None:
            self.bring(place)
            place.buffer.zero_()
        elif place.extent is not None:
            place.buffer = self._take(place.nbytes)
            place.buffer.zero_()
        place.is_here = True

    def put_away(self, place: Place) -> None:
        """Begin to store it, and give its buffer up, into which every copy has ended.

        Raises: TierError: an earlier write failed.
        """
        if place.extent is not None and place.buffer is not None:
            ticket = self.tier.write(place.extent, place.buffer[: place.nbytes])
            self._writes.append((ticket, place.buffer))
            place.buffer = None
            place.is_here = False
        while len(self._writes) > _BEHIND:
            self._finish_write()

    def let_go(self, place: Place) -> None:
        """Give up the buffer of what was not changed, once the copies out of it have ended."""
        if place.extent is not None and place.buffer is not None:
            self.give_back(place.buffer)
            place.buffer = None
            place.is_here = False

    def drain(self) -> None:
        """Wait until all is stored. Raises: TierError."""
        while self._writes:
            self._finish_write()

    def close(self) -> None:
        """Remove the files of the whole tier, and the buffers. Idempotent. What was on the disk is gone."""
        self._writes.clear()
        self._free.clear()
        self._free_nbytes = self._num_out = self._out_nbytes = 0
        self.tier.close()

    # memory

    def _take(self, nbytes: int) -> torch.Tensor:
        size = round_up(nbytes, PAGE)
        if not self._free.get(size):
            self._reap(size)
        free = self._free.get(size)
        self._num_out += 1
        self._out_nbytes += size
        if free:
            buffer, done = free.pop()
            done.block()
            self._free_nbytes -= size
            return buffer
        if self._max_ahead is not None and self.host_nbytes > self._max_ahead[1]:
            self._free.clear()  # of other sizes
            self._free_nbytes = 0
        return aligned_empty(size, is_pinned=self._is_pinned)

    def _reap(self, size: int) -> None:
        """Take back a buffer of this size whose write has ended."""
        for index, (ticket, buffer) in enumerate(self._writes):
            if buffer.numel() == size and ticket.is_done:
                del self._writes[index]
                ticket.wait()
                self.give_back(buffer)
                return

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for the next of its size."""
        self._free.setdefault(buffer.numel(), []).append((buffer, mark(self._device)))
        self._num_out -= 1
        self._out_nbytes -= buffer.numel()
        self._free_nbytes += buffer.numel()

    def _finish_write(self) -> None:
        ticket, buffer = self._writes.popleft()
        try:
            ticket.wait()
        finally:
            self.give_back(buffer)
