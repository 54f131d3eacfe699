"""One read or write between a tensor and a file, cut into parts that threads carry out in any order.

Direct input and output wants address, length and offset in whole pages. A part in whole pages goes straight between
the tensor and the file; the rest goes through a thread's bounce buffer. For a write that covers part of a page, the
page is read first.

    extent   |0.......|4096....|8192....|12288...| 16384 = the file's length: the extent's, in whole pages
    tensor         |-----------------------------|
    parts         |b |direct..|direct..|direct..|

With sums the unit is a block instead of a page: each block has its xxh3, is written whole and is checked whole before
any of its bytes are used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash

from shoal.errors import OutOfMemoryError, ShoalError, TierError, UsageError
from shoal.memory.host import PAGE, round_down, round_up
from shoal.memory.io_threads import Part
from shoal.text import format_bytes


def clipped(ranges: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of ranges that lie in [begin, end).

    >>> clipped([(0, 4), (6, 20)], 2, 10)
    [(2, 4), (6, 10)]
    """
    parts = [(max(start, begin), min(stop, end)) for start, stop in ranges]
    return [(start, stop) for start, stop in parts if start < stop]


class Intervals:
    """Half-open ranges, sorted, neither overlapping nor touching: which bytes of a file hold something.

    >>> written = Intervals()
    >>> written.add(0, 10), written.add(10, 20), written.remove(4, 6)
    (None, None, None)
    >>> written.ranges
    [(0, 4), (6, 20)]
    >>> written.covers(6, 20), written.covers(0, 6)
    (True, False)
    >>> written.missing(2, 30)
    [(4, 6), (20, 30)]
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        kept = []
        for low, high in self.ranges:
            if high < start or low > stop:
                kept.append((low, high))
            else:
                start, stop = min(start, low), max(stop, high)
        self.ranges = sorted([*kept, (start, stop)])

    def remove(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        left = []
        for low, high in self.ranges:
            left += [(low, min(high, start)), (max(low, stop), high)]
        self.ranges = [(low, high) for low, high in left if low < high]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range that are not in the set."""
        left = Intervals()
        left.add(start, stop)
        for low, high in self.ranges:
            left.remove(low, high)
        return left.ranges

    def covers(self, start: int, stop: int) -> bool:
        """True if every byte of the range is in the set."""
        return start >= stop or any(low <= start and stop <= high for low, high in self.ranges)


_MAX_IDLE_CALLS = 8  # system calls in a row that may move nothing


@dataclass(frozen=True)
class Way:
    """How a tier's files are read and written."""

    is_direct: bool
    checks_sums: bool
    block_nbytes: int  # one request to the device; a multiple of a page
    part_nbytes: int  # one system call, which the kernel splits into requests; a multiple of ``block_nbytes``

    @property
    def grain(self) -> int:
        """What a write must cover whole, or read first."""
        return self.block_nbytes if self.checks_sums else PAGE if self.is_direct else 1


@dataclass(eq=False)
class FileExtent:
    """Room on the disk for one thing, in a file of its own."""

    name: str
    nbytes: int
    path: str
    file_name: str
    identity: tuple[int, int]  # device and inode: a file put in its place is noticed
    written: Intervals = field(default_factory=Intervals, repr=False)
    sums: dict[int, int] = field(default_factory=dict, repr=False)  # block to xxh3
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # guards ``written``, ``sums``, ``lost``
    is_free: bool = False
    lost: BaseException | None = field(default=None, repr=False)  # why the last write that failed did

    @property
    def file_nbytes(self) -> int:
        return round_up(self.nbytes, PAGE)


class Traffic:
    """Bytes that were read and written, counted by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_nbytes = 0
        self.written_nbytes = 0

    def add(self, nbytes: int, *, is_write: bool) -> None:
        with self._lock:
            if is_write:
                self.written_nbytes += nbytes
            else:
                self.read_nbytes += nbytes


@dataclass(frozen=True)
class Cut:
    """A part of a range of a file."""

    start: int
    stop: int
    is_bounced: bool


def cut(start: int, stop: int, *, grain: int, part_nbytes: int, is_aligned: bool) -> Iterator[Cut]:
    """Cut ``[start, stop)`` at multiples of ``part_nbytes``, and at the first and the last multiple of ``grain``.

    Args:
        is_aligned: the memory of whole grains can be handed to the kernel as it is.

    >>> [(c.start, c.stop, c.is_bounced) for c in cut(10, 41, grain=4, part_nbytes=16, is_aligned=True)]
    [(10, 12, True), (12, 16, False), (16, 32, False), (32, 40, False), (40, 41, True)]
    """
    while start < stop:
        end = min(stop, round_down(start, part_nbytes) + part_nbytes)
        if not is_aligned:
            yield Cut(start, end, True)
        elif start % grain:
            end = min(end, round_up(start, grain))
            yield Cut(start, end, True)
        elif end - start < grain:
            yield Cut(start, end, True)
        else:
            end = round_down(end, grain)
            yield Cut(start, end, False)
        start = end


class DiskTransfer:
    """An operation of ``IoThreads``: ``tensor`` to or from ``[start, stop)`` of an extent.

    Args:
        open_file: gives a descriptor of the extent's file, opened with these flags.
        traffic: counts the bytes once all of them are transferred.
    """

    def __init__(
        self,
        extent: FileExtent,
        tensor: torch.Tensor,
        start: int,
        *,
        is_write: bool,
        way: Way,
        open_file: Callable[[str, int], int],
        traffic: Traffic,
    ) -> None:
        self.key: object = extent
        self.is_write = is_write
        self._extent = extent
        self._memory = as_bytes(tensor)
        self._view = self._memory.numpy().data
        self._start = start
        self._stop = start + len(self._view)
        # What it orders itself by: the bytes that it touches, those of its first and last grain included.
        self.start, self.stop = round_down(self._start, way.grain), round_up(self._stop, way.grain)
        self._way = way
        self._open_file = open_file
        self._traffic = traffic
        self._fd = -1

    def begin(self) -> list[Part]:
        """Open the file and cut the range.

        Raises: TierError: the file is not there, another, or too short, or the write of what is read failed.
            UsageError: what is read was never written.
        """
        extent, nbytes = self._extent, self._stop - self._start
        with extent.lock:
            is_there, lost = extent.written.covers(self._start, self._stop), extent.lost
        if not self.is_write and not is_there:
            which = f"bytes {self._start} to {self._stop} of {extent.name!r}"
            if lost is not None:
                why = lost.what if isinstance(lost, ShoalError) else f"{type(lost).__name__}: {lost}"
                raise TierError(
                    f"{which} are missing, because a write failed: {why}",
                    where=extent.path,
                    do=getattr(lost, "do", "") or "resume from the last checkpoint.",
                    code=getattr(lost, "code", "tier-io"),
                ) from lost
            raise UsageError(
                f"{which} were never written.",
                where=extent.path,
                do="write before reading, and wait on the tickets of writes.",
                code="tier-not-written",
            )
        if not nbytes:
            return []
        try:
            self._fd = self._open_file(extent.file_name, os.O_RDWR | (os.O_DIRECT if self._way.is_direct else 0))
            status = os.fstat(self._fd)
        except OSError as error:
            raise self._failed(error, "opening the file", self._start, nbytes) from error
        if (status.st_dev, status.st_ino) != extent.identity:
            raise TierError(
                "the file is not the one that was made here: another file has replaced it.",
                where=extent.path,
                do="find out what else writes to this folder. Resume from the last checkpoint.",
                code="tier-replaced",
            )
        if status.st_size < extent.file_nbytes:
            raise too_short(extent.path, start=self._start, nbytes=nbytes, found_nbytes=status.st_size)
        is_aligned = not self._way.is_direct or (self._memory.data_ptr() - self._start) % PAGE == 0
        parts = cut(
            self._start,
            self._stop,
            grain=self._way.grain,
            part_nbytes=self._way.part_nbytes,
            is_aligned=is_aligned,
        )
        return [partial(self._bounce if part.is_bounced else self._go_straight, part) for part in parts]

    def end(self, error: BaseException | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if error is None:
            self._traffic.add(self._stop - self._start, is_write=self.is_write)
        if not self.is_write:
            return
        with self._extent.lock:
            if error is None:
                self._extent.written.add(self._start, self._stop)
            else:  # what shares a grain with it was rewritten too
                self._extent.lost = error
                self._extent.written.remove(self.start, self.stop)
                for block in range(self.start // self._way.block_nbytes, -(-self.stop // self._way.block_nbytes)):
                    self._extent.sums.pop(block, None)

    def _go_straight(self, part: Cut, bounce: torch.Tensor) -> None:
        view = self._view[part.start - self._start : part.stop - self._start]
        if self.is_write:
            self._keep_sums(view, part.start)
            self._write(view, part.start)
        else:
            self._read(view, part.start)
            self._check_sums(view, part.start)

    def _bounce(self, part: Cut, bounce: torch.Tensor) -> None:
        low = round_down(part.start, self._way.grain)
        high = min(round_up(part.stop, self._way.grain), self._extent.file_nbytes)
        whole = bounce.numpy().data[: high - low]
        there, here = bounce.data_ptr() + part.start - low, self._memory.data_ptr() + part.start - self._start
        if not self.is_write:
            self._read(whole, low)
            self._check_sums(whole, low)
            ctypes.memmove(here, there, part.stop - part.start)  # unlike a slice's assignment, it lets others run
            return
        self._fill_edges(part, whole, low)
        ctypes.memmove(there, here, part.stop - part.start)
        self._keep_sums(whole, low)
        self._write(whole, low)

    def _fill_edges(self, part: Cut, whole: memoryview, low: int) -> None:
        """Read the first and last grain, where this write covers only part of them."""
        grain, high = self._way.grain, low + len(whole)
        edges = set()
        if part.start > low:
            edges.add(low)
        if part.stop < min(high, self._extent.nbytes):
            edges.add(round_down(part.stop, grain))
        for edge in edges:
            view = whole[edge - low : min(edge + grain, high) - low]
            self._read(view, edge)
            self._check_sums(view, edge)
        if part.stop == self._extent.nbytes < high:
            padding = high - part.stop
            whole[len(whole) - padding :] = bytes(padding)

    def _keep_sums(self, view: memoryview, start: int) -> None:
        if self._way.checks_sums:
            new = dict(self._sums(view, start))
            with self._extent.lock:
                self._extent.sums.update(new)

    def _check_sums(self, view: memoryview, start: int) -> None:
        if not self._way.checks_sums:
            return
        for block, actual in self._sums(view, start):
            with self._extent.lock:
                expected = self._extent.sums.get(block)
            if expected is not None and actual != expected:
                raise TierError(
                    f"a block of {self._extent.name!r} is not what was written: its xxh3 is {actual:016x}, "
                    f"it was {expected:016x}.",
                    where=f"{self._extent.path}, {self._way.block_nbytes} bytes at offset "
                    f"{block * self._way.block_nbytes}",
                    do="test the device and the host's memory; find out what else writes to this folder. "
                    "Resume from the last checkpoint.",
                    code="tier-damaged",
                )

    def _sums(self, view: memoryview, start: int) -> Iterator[tuple[int, int]]:
        size = self._way.block_nbytes
        for offset in range(0, len(view), size):
            yield (start + offset) // size, xxhash.xxh3_64_intdigest(view[offset : offset + size])

    def _read(self, view: memoryview, start: int) -> None:
        """Fill ``view``; where the kernel gives less, ask again.

        Raises: TierError: the file ends, or the device fails.
        """
        self._move("reading", lambda rest, offset: os.preadv(self._fd, [rest], offset), view, start)

    def _write(self, view: memoryview, start: int) -> None:
        self._move("writing", lambda rest, offset: os.pwritev(self._fd, [rest], offset), view, start)

    def _move(self, doing: str, call: Callable[[memoryview, int], int], view: memoryview, start: int) -> None:
        done, num_idle = 0, 0
        while done < len(view):
            try:
                moved = call(view[done:], start + done)
            except OSError as error:
                raise self._failed(error, doing, start + done, len(view) - done) from error
            if self._way.is_direct and moved < len(view) - done:
                moved = round_down(moved, PAGE)  # the next call must begin on a page
            done += moved
            num_idle = 0 if moved else num_idle + 1
            if num_idle == _MAX_IDLE_CALLS or (not moved and doing == "reading"):
                size = os.fstat(self._fd).st_size
                if size < start + len(view):
                    raise too_short(self._extent.path, start=start + done, nbytes=len(view) - done, found_nbytes=size)
            if num_idle == _MAX_IDLE_CALLS:
                cause = OSError(errno.EIO, f"the device transferred nothing, {num_idle} times in a row")
                raise self._failed(cause, doing, start + done, len(view) - done)

    def _failed(self, cause: OSError, doing: str, start: int, nbytes: int) -> Exception:
        return failed(cause, f"{doing} for {self._extent.name!r}", path=self._extent.path, start=start, nbytes=nbytes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes. Shape: [nbytes], uint8.

    Raises: UsageError: not in host memory, or not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"a disk is read to and written from contiguous host memory; this tensor is on {tensor.device.type}, "
            f"shape {tuple(tensor.shape)}, stride {tensor.stride()}.",
            do="copy it into a contiguous staging buffer on the host.",
        )
    flat: Any = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


# The errors of the disk: what failed, which file, which bytes, how much room there is.

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(needed_nbytes: int, available_nbytes: int, *, where: str, what: str = "") -> OutOfMemoryError:
    """The disk has less room than is needed."""
    return OutOfMemoryError(
        f"{what or 'the disk is too full'}: {format_bytes(needed_nbytes)} ({needed_nbytes} bytes) are needed, "
        f"{format_bytes(available_nbytes)} ({available_nbytes} bytes) are available.",
        where=where,
        do="free space, name another folder (nvme_path), or offload less to it.",
        code="tier-no-room",
    )


def failed(cause: OSError, doing: str, *, path: str, start: int, nbytes: int) -> ShoalError:
    """A system call failed while ``nbytes`` at ``start`` of ``path`` were read or written."""
    where = f"{path}, {nbytes} bytes at offset {start}"
    if cause.errno in NO_ROOM:
        return no_room(
            nbytes,
            free_nbytes(os.path.dirname(path)),
            where=where,
            what=f"{doing} failed ({cause.strerror})",
        )
    return TierError(
        f"{doing} failed: {cause.strerror or cause}.",
        where=where,
        do="look at the system's log (dmesg) for the device, and at who else changes the folder. "
        "Resume from the last checkpoint.",
        code="tier-io",
    )


def too_short(path: str, *, start: int, nbytes: int, found_nbytes: int) -> TierError:
    """The file ends before the bytes that were written to it."""
    return TierError(
        f"the file ends at {found_nbytes}, but bytes up to {start + nbytes} were written to it.",
        where=f"{path}, {nbytes} bytes at offset {start}",
        do="find out what truncates files in this folder; nothing else may write to it. "
        "Resume from the last checkpoint.",
        code="tier-truncated",
    )


def free_nbytes(folder: str) -> int:
    """Bytes that this user may still write to the file system of ``folder``; 0 where it cannot be asked."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
