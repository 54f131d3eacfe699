"""The C library's heap, from which host tensors come: what a step frees stays with the process, for the next step.

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel clears every page again when the
next step touches it. A step frees and takes the same blocks each time, so that is paid for nothing (mallopt(3):
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).

What lasts longer than a step lies outside of the heap, where it would divide the places that steps take and free. It is
taken until the first step has ended: master weights, gradients, the optimizer's state. Until then each large block is
mapped by itself.
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
_MAPS = 65536  # blocks mapped by themselves, at most: glibc's own number
_GROWTH = 1.25


def resident_nbytes() -> int:
    """Bytes of physical memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class HostHeap:
    """Keeps what is freed from the end of the first step on, and gives it back where it has grown by a quarter.

    Steps that are alike fit into the places of those before, so that nothing grows. Where sizes differ from step to
    step the free places fit worse and worse; then they are given back.
    """

    is_kept: ClassVar[bool] = False  # the process has one heap, whoever steps

    def __init__(self) -> None:
        self._resident = 0  # after the first step since free pages were given back; 0: not known yet

    @classmethod
    def begin(cls) -> HostHeap | None:
        """Somebody begins to take what lasts. None: this process's C library cannot be told so (not glibc)."""
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
        """Give the whole pages that nothing uses back to the kernel."""
        _library().malloc_trim(0)
        self._resident = 0


def keep_freed() -> None:
    """Let this process keep what it frees, large blocks too."""
    library = _library()
    # Older ones refuse a threshold above 32 MiB: then no block at all is mapped by itself.
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
