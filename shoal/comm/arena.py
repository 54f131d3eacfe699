"""Memory that the other ranks of this host can map: segments without a name, cut into tensors.

A segment is an anonymous file (``memfd_create``). A peer opens it as ``/proc/<pid>/fd/<fd>``, so no name exists that a
killed process could leave behind: the memory goes when the last process that maps it goes.

    segment   |#### tensor ####|.. free ..|#### tensor ####|........ free ........|      blocks of 128 bytes

A block is free again when the last view of its tensor is gone. Its pages stay, for the next tensor.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import torch

ALIGNMENT = 128  # bytes: two cache lines, and more than any vector load needs
_PAGE = 2 << 20
_MIN_SEGMENT_BYTES = 32 << 20
_MAX_GROWTH_BYTES = 1 << 30


@dataclass
class Segment:
    """One mapped file of this rank."""

    serial: int  # never used twice, unlike fd
    fd: int
    nbytes: int
    memory: memoryview
    address: int
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, nbytes), sorted, never adjacent

    def take(self, nbytes: int) -> int | None:
        """The offset of a block of ``nbytes``, the first that fits."""
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                if size == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (offset + nbytes, size - nbytes)
                return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        insort(self.free, (offset, nbytes))
        index = self.free.index((offset, nbytes))
        if index + 1 < len(self.free) and offset + nbytes == self.free[index + 1][0]:
            self.free[index] = (offset, nbytes + self.free.pop(index + 1)[1])
        if index > 0 and sum(self.free[index - 1]) == offset:
            _, size = self.free.pop(index)
            before, before_size = self.free[index - 1]
            self.free[index - 1] = (before, before_size + size)


class Arena:
    """The segments of this rank.

    Memory: what was ever in use at once, rounded up to 2 MiB a segment, on the host, until ``close()`` and the end of
    every tensor and every peer's map. Pages never written take none.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        # Filled by finalizers, which may run at any moment and in any thread; emptied by the next allocation.
        self._returned: deque[tuple[Segment, int, int]] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own storage in a segment."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        segment, offset = self._take(nbytes)
        block = segment.memory[offset : offset + numel * dtype.itemsize]
        # The storage holds the block; when it goes, so does the block.
        weakref.finalize(block, self._returned.append, (segment, offset, nbytes)).atexit = False
        return torch.frombuffer(block, dtype=dtype)

    def locate(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment and offset where ``tensor`` lies; None: elsewhere."""
        address = tensor.data_ptr()
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.nbytes:
                return segment, address - segment.address
        return None

    @property
    def nbytes(self) -> int:
        """Mapped, in use or not."""
        return sum(segment.nbytes for segment in self.segments)

    def close(self) -> None:
        """Close the files; tensors keep their memory as long as they live."""
        for segment in self.segments:
            os.close(segment.fd)
        self.segments = []

    def _take(self, nbytes: int) -> tuple[Segment, int]:
        while self._returned:
            segment, offset, size = self._returned.popleft()
            segment.give_back(offset, size)
        for segment in self.segments:
            found = segment.take(nbytes)
            if found is not None:
                return segment, found
        segment = self._grow(nbytes)
        found = segment.take(nbytes)
        assert found is not None
        return segment, found

    def _grow(self, nbytes: int) -> Segment:
        wanted = max(nbytes, min(self.nbytes, _MAX_GROWTH_BYTES), _MIN_SEGMENT_BYTES)
        size = -(-wanted // _PAGE) * _PAGE
        fd, mapped = make_file("shoal-arena", size)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        serial = self.segments[-1].serial + 1 if self.segments else 0
        segment = Segment(serial, fd, size, memoryview(mapped), whole.data_ptr(), [(0, size)])
        self.segments.append(segment)
        return segment


def make_file(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """An anonymous file of zeros, and this process's map of it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def map_file(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Another process's file, mapped here.

    Raises: OSError: this process may not see that one, or it is gone.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)
