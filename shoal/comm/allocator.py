"""Memory that the other ranks of this host can map: anonymous files, divided into tensors.

A file is made by ``memfd_create``. A peer opens it as ``/proc/<pid>/fd/<fd>``, so it has no name that a killed process
could leave behind: its memory is freed when the last process that maps it ends.

    file      |#### tensor ####|.. free ..|#### tensor ####|........ free ........|      blocks of 128 bytes

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
_MIN_FILE_BYTES = 32 << 20
_MAX_GROWTH_BYTES = 1 << 30


@dataclass
class SharedFile:
    """One mapped file of this rank."""

    serial: int  # never used twice, unlike fd
    fd: int
    nbytes: int
    memory: memoryview
    address: int
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, nbytes), sorted, never adjacent

    def acquire(self, nbytes: int) -> int | None:
        """The offset of a block of ``nbytes``, the first that fits."""
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                if size == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (offset + nbytes, size - nbytes)
                return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        insort(self.free, (offset, nbytes))
        index = self.free.index((offset, nbytes))
        if index + 1 < len(self.free) and offset + nbytes == self.free[index + 1][0]:
            self.free[index] = (offset, nbytes + self.free.pop(index + 1)[1])
        if index > 0 and sum(self.free[index - 1]) == offset:
            _, size = self.free.pop(index)
            before, before_size = self.free[index - 1]
            self.free[index - 1] = (before, before_size + size)


class _BlockInUse(weakref.ref[memoryview]):
    """A block that a tensor has. (``weakref.finalize`` takes several times as long.)

    Args:
        place: its file, offset and bytes.
    """

    __slots__ = ("place",)
    place: tuple[SharedFile, int, int]


class SharedAllocator:
    """The shared files of this rank.

    Memory: the largest amount in use at once, rounded up to 2 MiB a file, on the host, until ``close()`` and the end of
    every tensor and every peer's map. Pages that were never written take none.
    """

    def __init__(self) -> None:
        self.files: list[SharedFile] = []
        self._blocks: dict[int, _BlockInUse] = {}  # by id
        # Filled by callbacks, which may run at any moment and in any thread; emptied by the next allocation.
        self._returned: deque[tuple[SharedFile, int, int]] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own in a file."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        nbytes = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        file, offset = self._acquire(nbytes)
        block = file.memory[offset : offset + numel * dtype.itemsize]
        # The storage holds the memoryview of the block; when the storage is freed, the block is returned.
        reference = _BlockInUse(block, self._return)
        reference.place = file, offset, nbytes
        self._blocks[id(reference)] = reference
        return torch.frombuffer(block, dtype=dtype)

    def _return(self, reference: _BlockInUse) -> None:
        del self._blocks[id(reference)]
        self._returned.append(reference.place)

    def locate(self, tensor: torch.Tensor) -> tuple[SharedFile, int] | None:
        """The file and offset of ``tensor``; None: it is not in a file of this allocator."""
        address = tensor.data_ptr()
        for file in self.files:
            if file.address <= address < file.address + file.nbytes:
                return file, address - file.address
        return None

    @property
    def nbytes(self) -> int:
        """Mapped, in use or not."""
        return sum(file.nbytes for file in self.files)

    def close(self) -> None:
        """Close the files. Tensors keep their memory as long as they live."""
        for file in self.files:
            os.close(file.fd)
        self.files = []

    def _acquire(self, nbytes: int) -> tuple[SharedFile, int]:
        while self._returned:
            file, offset, size = self._returned.popleft()
            file.release(offset, size)
        for file in self.files:
            result = file.acquire(nbytes)
            if result is not None:
                return file, result
        file = self._grow(nbytes)
        result = file.acquire(nbytes)
        assert result is not None
        return file, result

    def _grow(self, nbytes: int) -> SharedFile:
        wanted = max(nbytes, min(self.nbytes, _MAX_GROWTH_BYTES), _MIN_FILE_BYTES)
        size = -(-wanted // _PAGE) * _PAGE
        fd, mapped = make_file("shoal-allocator", size)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        serial = self.files[-1].serial + 1 if self.files else 0
        file = SharedFile(serial, fd, size, memoryview(mapped), whole.data_ptr(), [(0, size)])
        self.files.append(file)
        return file


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
    """Map another process's file.

    Raises: OSError: this process may not see that one, or it has ended.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)
