"""Host memory that begins on a page, as direct input and output wants it, and a fixed set of such buffers."""

from __future__ import annotations

import logging
import mmap
import threading
from contextlib import suppress

import torch

from shoal.errors import OutOfMemoryError, UsageError
from shoal.memory.available import host_available_nbytes
from shoal.text import format_bytes

logger = logging.getLogger("shoal")

PAGE = 4096  # bytes: what direct input and output aligns address, length and offset to
_HUGE_PAGE = 2 * 1024 * 1024


def round_down(value: int, unit: int) -> int:
    return value // unit * unit


def round_up(value: int, unit: int) -> int:
    """
    >>> round_up(4097, 4096), round_up(4096, 4096)
    (8192, 4096)
    """
    return -(-value // unit) * unit


def aligned_empty(nbytes: int, *, is_pinned: bool = False, is_inherited: bool = True) -> torch.Tensor:
    """Host memory that begins on a page. Shape: [nbytes], uint8; the values are arbitrary.

    Args:
        is_pinned: page-lock it for an accelerator. Without an accelerator this is ignored; where no more memory can be
            locked the memory is an ordinary one, and a line in the log says so.
        is_inherited: processes forked from this one see the memory. Where they do not, a fork during a direct read
            cannot turn the page that is being read into the child's (kernels before 5.19 could). Pinned memory is as
            the accelerator's driver made it.

    Raises: OutOfMemoryError: the system refuses that much.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if is_pinned and torch.accelerator.is_available():
        try:
            return _pinned(nbytes)
        except (RuntimeError, MemoryError) as error:
            logger.warning(
                "%s of host memory could not be page-locked (%s); ordinary memory takes its place, so copies to the "
                "device are slower.",
                format_bytes(nbytes),
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise host_too_small(nbytes) from error
    if nbytes >= _HUGE_PAGE:
        with suppress(OSError):  # fewer pages to look up for each request
            memory.madvise(mmap.MADV_HUGEPAGE)
    if not is_inherited:
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if memory.data_ptr() % PAGE == 0:
        return memory
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
    skipped = -memory.data_ptr() % PAGE
    return memory[skipped : skipped + nbytes]


def host_too_small(needed_nbytes: int) -> OutOfMemoryError:
    """Host memory is less than what is needed, which is said beside what is there."""
    available = host_available_nbytes()
    return OutOfMemoryError(
        f"host memory is too small: {format_bytes(needed_nbytes)} ({needed_nbytes} bytes) are needed, "
        f"{format_bytes(available)} ({available} bytes) are available.",
        do="offload less to the host (ratio, max_in_cpu), use fewer or smaller buffers (buffer_count, buffer_size), "
        "run fewer ranks on this machine, or raise the limit.",
        code="host-too-small",
    )


class BufferPool:
    """``buffer_count`` equal buffers, allocated at the start. Any thread may take one and any may give it back.

    Args:
        buffer_nbytes: of one buffer; rounded up to whole pages.
        is_pinned: as in ``aligned_empty``.

    Raises: OutOfMemoryError: they do not fit the host's memory, which is asked before any of it is taken.
    Memory: ``nbytes`` on the host until the pool and the buffers that are out are gone.
    """

    def __init__(self, buffer_count: int, buffer_nbytes: int, *, is_pinned: bool = False) -> None:
        if buffer_count < 1 or buffer_nbytes < 1:
            raise UsageError(
                f"a pool of {buffer_count} buffers of {buffer_nbytes} bytes holds nothing.",
                do="ask for at least one buffer of one byte.",
            )
        self.buffer_count = buffer_count
        self.buffer_nbytes = round_up(buffer_nbytes, PAGE)
        if self.nbytes > host_available_nbytes():
            raise host_too_small(self.nbytes)
        # One allocation, so that the memory cannot run out half-way and the log says once that it is not page-locked.
        # Inherited by no child: data workers are forked while reads are in flight.
        self._whole = aligned_empty(self.nbytes, is_pinned=is_pinned, is_inherited=False)
        self._buffers: list[torch.Tensor] = list(self._whole.split(self.buffer_nbytes))
        self._free = list(self._buffers)
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        return self.buffer_count * self.buffer_nbytes

    @property
    def is_pinned(self) -> bool:
        return bool(self._whole.is_pinned())

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, timeout_seconds: float = 600.0) -> torch.Tensor:
        """A free buffer, [buffer_nbytes] uint8, whose values are whatever its last user left.

        Raises: UsageError: none was given back in ``timeout_seconds``.
        Order: blocks the host until one is free.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_seconds):
                raise UsageError(
                    f"all {self.buffer_count} buffers were out for {timeout_seconds:g} seconds.",
                    do="give buffers back, or raise buffer_count.",
                    code="buffers-exhausted",
                )
            return self._free.pop()

    def try_take(self) -> torch.Tensor | None:
        """A free buffer, or None."""
        with self._changed:
            return self._free.pop() if self._free else None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer. Raises: UsageError: it is not this pool's, or was given back before."""
        with self._changed:
            if not any(buffer is own for own in self._buffers) or any(buffer is free for free in self._free):
                raise UsageError(
                    "this buffer is not one of the pool's that are out.",
                    do="give back the tensor that take() returned, once, and not a view of it.",
                )
            self._free.append(buffer)
            self._changed.notify()
