"""The C library's heap, from which host tensors are allocated: when freed memory stays with the process.

glibc returns large blocks to the kernel as soon as they are freed, and the kernel clears every page again when the next
step touches it. A step allocates and frees the same blocks each time, so after the first step the process keeps them
(mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).

Before the first step it is the other way round. While a model is built and sharded, whole parameters are freed and
their shards stay; from one heap, the shards would pin the pages of the freed parameters around them. Main parameters,
gradients and optimizer state, which live longer than a step, would split the free blocks that steps reuse. Therefore
each large block is mapped separately from the start of ``zero.Init`` or ``initialize`` until the first step has ended.
"""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from typing import Any, ClassVar

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_MOST = 2**31 - 1  # mallopt takes a C int
_LARGE_NBYTES = 128 * 1024
_MAPS = 65536  # separately mapped blocks, at most: glibc's default
_GROWTH = 1.25


def resident_nbytes() -> int:
    """Bytes of physical memory that this process uses now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class HostHeap:
    """Keeps freed memory from the end of the first step on, and trims the heap when it has grown by a quarter.

    Equal steps reuse the same blocks, so the heap does not grow. Where sizes differ from step to step, fragmentation
    makes it grow; then unused pages are returned to the kernel.
    """

    is_kept: ClassVar[bool] = False  # the process has one heap, whichever engine steps

    def __init__(self) -> None:
        self._resident = 0  # after the first step since the last trim; 0: not known yet

    @classmethod
    def begin(cls) -> HostHeap | None:
        """Map each large block separately until the next step has ended, of whichever engine.

        Returns: None where the C library is not glibc.
        """
        library = _library()
        if library is None:
            return None
        library.mallopt(_M_MMAP_MAX, _MAPS)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)
        HostHeap.is_kept = False
        return cls()

    def after_step(self, _: object = None) -> None:
        if not HostHeap.is_kept:
            HostHeap.is_kept = True
            keep_freed()
            return
        resident = resident_nbytes()
        if not self._resident:
            self._resident = resident
        elif resident > _GROWTH * self._resident:
            self.give_back()

    def give_back(self) -> None:
        """Return whole unused pages to the kernel."""
        trim()
        self._resident = 0


def trim() -> None:
    """Return whole unused pages of the heap to the kernel."""
    if (library := _library()) is not None:
        library.malloc_trim(0)


def keep_freed() -> None:
    """Keep freed memory, large blocks included, in the process from now on."""
    library = _library()
    # Older versions refuse a threshold above 32 MiB: then no block is mapped separately.
    if not library.mallopt(_M_MMAP_THRESHOLD, _MOST):
        library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, _MOST)


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
