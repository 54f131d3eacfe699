"""The C library's heap, from which host tensors come: what a step frees stays with the process, for the next step.

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel clears every page again when the
next step touches it. A step frees and takes the same blocks each time, so that is paid for nothing (mallopt(3):
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_MOST = 2**31 - 1  # mallopt takes a C int
_GROWTH = 1.25


def resident_nbytes() -> int:
    """Bytes of physical memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class HostHeap:
    """Keeps what is freed, and gives it back where it has grown by a quarter.

    Steps that are alike fit into the places of those before, so that nothing grows. Where sizes differ from step to
    step the free places fit worse and worse; then they are given back.
    """

    def __init__(self) -> None:
        self._resident = 0  # after the first step since free pages were given back; 0: not known yet

    @classmethod
    def keep(cls) -> HostHeap | None:
        """Let this process keep what it frees, from now on. None: its C library cannot be told so (not glibc)."""
        return cls() if _keep_freed() else None

    def after_step(self, _: object = None) -> None:
        resident = resident_nbytes()
        if not self._resident:
            self._resident = resident
        elif resident > _GROWTH * self._resident:
            self.give_back()

    def give_back(self) -> None:
        """Give the whole pages that nothing uses back to the kernel."""
        _library().malloc_trim(0)
        self._resident = 0


@cache
def _keep_freed() -> bool:
    library = _library()
    if library is None:
        return False
    # Older ones refuse a threshold above 32 MiB: then no block at all is mapped by itself.
    if not library.mallopt(_M_MMAP_THRESHOLD, _MOST) and not library.mallopt(_M_MMAP_MAX, 0):
        return False
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _MOST))


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
