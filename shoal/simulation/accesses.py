"""Which operation has read and written which bytes of a storage last, and how the check of streams reports a fault."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FrameType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.simulation.clocks import Clock, SimulatedStream
from shoal.text import format_bytes

_SKIPPED = (
    "/torch/",
    "/contextlib.py",
    "/threading.py",
    "/concurrent/",
    "/shoal/simulation/",
    "/shoal/streams.py",
    "/shoal/comm/",
    "/shoal/memory/",
    "/shoal/running/parameter_access.py",
)
_NUM_PLACES = 3


def place_of_call() -> str:
    """The lines of Python, outside of torch and of what every operation passes through, that are running."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < _NUM_PLACES:
        code = frame.f_code
        if not _is_skipped(code.co_filename):
            name = code.co_filename if not places else code.co_filename.rpartition("/")[2]
            places.append(f"{name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", called by ".join(places)


@cache
def _is_skipped(file: str) -> bool:
    return any(part in file for part in _SKIPPED)


@dataclass(frozen=True, eq=False)
class Access:
    """One operation's reads and writes.

    Attributes: ``number``: of the operation in its stream. ``place``: the line of Python that asked for it.
    """

    stream: SimulatedStream
    number: int
    name: str
    place: str

    def is_before(self, clock: Clock) -> bool:
        return self.number <= clock.get(self.stream, 0)


@dataclass
class _Touched:
    start: int
    write: Access | None
    reads: dict[SimulatedStream, Access] = field(default_factory=dict)  # since the write, the last of each stream


class TrackedStorage:
    """The accesses of one storage, byte by byte.

    Args:
        is_host: it lies in host memory. None: a single value, which is passed to kernels by the host, until an
            operation of the device writes it.
        at_death: called with the storage's number, which until this object is gone no other storage gets. It is called
            in any thread, between any two lines of Python.

    Attributes: ``stream``: on which it was allocated; None: before the simulation, or on the host. ``pool``: in which
    it was allocated; None: with all other memory.
    """

    def __init__(self, storage: torch.UntypedStorage, *, is_host: bool | None, at_death: Callable[[int], None]) -> None:
        self.ref = StorageWeakRef(storage)
        number = storage._cdata
        self._watch = weakref.ref(storage, lambda _: at_death(number))
        self.nbytes = storage.nbytes()
        self.is_host = is_host
        self.is_pinned = False
        self.stream: SimulatedStream | None = None
        self.pool: object = None
        self.recorded: set[SimulatedStream] = set()
        self.name = ""
        self._segments = [_Touched(0, None)]

    def forget(self) -> None:
        """Its memory is another now."""
        self._segments = [_Touched(0, None)]
        self.recorded.clear()

    def conflicts(
        self, start: int, stop: int, access: Access, clock: Clock, *, is_write: bool
    ) -> Iterator[tuple[Access, bool, int, int]]:
        """Log an access of bytes ``[start, stop)``.

        Yields: earlier accesses that conflict and that ``clock`` does not know to be over; True for a write; the bytes.
        """
        first, last = self._cut(start), self._cut(stop)
        for index in range(first, last):
            segment = self._segments[index]
            end = self._segments[index + 1].start if index + 1 < len(self._segments) else stop
            if segment.write is not None and not segment.write.is_before(clock):
                yield segment.write, True, segment.start, end
            if is_write:
                for read in segment.reads.values():
                    if not read.is_before(clock):
                        yield read, False, segment.start, end
            else:
                segment.reads[access.stream] = access
        if is_write:
            self._segments[first:last] = [_Touched(start, access)]

    def unordered(self, clock: Clock) -> Iterator[tuple[Access, bool, int, int]]:
        """Accesses that ``clock`` does not know to be over."""
        for index, segment in enumerate(self._segments):
            end = self._segments[index + 1].start if index + 1 < len(self._segments) else self.nbytes
            accesses = [(read, False) for read in segment.reads.values()]
            if segment.write is not None:
                accesses.append((segment.write, True))
            for access, is_write in accesses:
                if not access.is_before(clock):
                    yield access, is_write, segment.start, end

    def _cut(self, at: int) -> int:
        """Make a segment begin at a byte. Returns: its index."""
        index = bisect_right(self._segments, at, key=lambda segment: segment.start) - 1
        segment = self._segments[index]
        if segment.start == at:
            return index
        self._segments.insert(index + 1, _Touched(at, segment.write, dict(segment.reads)))
        return index + 1


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor shows, and the one after the last; equal: none.

    Of a tensor with gaps (a column), the bytes between count too.

    >>> bytes_of(torch.zeros(4, 4)[1:3, :2])
    (16, 40)
    """
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return 0, 0
    last = sum(int((length - 1) * stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


@dataclass
class StreamFinding:
    """One fault: what, where, and the missing wait. ``count``: how often it came up."""

    text: str
    count: int = 1

    def __str__(self) -> str:
        return self.text + (f"\n  This came up {self.count} times." if self.count > 1 else "")


def race(memory: str, start: int, stop: int, old: Access, was_write: bool, new: Access, is_write: bool) -> str:
    """Two operations of which at least one writes, without an order between them."""
    return (
        f"{memory}, bytes {start} to {stop} ({format_bytes(stop - start)}): "
        f"{_did(new, is_write)} before {_did(old, was_write)} is known to be over."
        f"\n  first:   {_said(old)}\n  then:    {_said(new)}"
        f"\n  missing: {_wait(new.stream.name, old)}, before the second operation."
    )


@dataclass(frozen=True)
class FreedBytes:
    """Memory that was given back to the allocator before an access was known to be over."""

    memory: str
    start: int
    stop: int
    access: Access
    was_write: bool
    how: str
    place: str


def reused(freed: FreedBytes, stream: str, place: str) -> str:
    """Memory that was freed, and that the next allocation may use while another stream still does."""
    access, start, stop = freed.access, freed.start, freed.stop
    return (
        f"{freed.memory}, bytes {start} to {stop} ({format_bytes(stop - start)}): the memory was freed ({freed.how}), "
        f"and {stream} allocates, maybe this memory, before {_did(access, freed.was_write)} is known to be over."
        f"\n  first:   {_said(access)}\n  freed:   at {freed.place}\n  then:    an allocation, at {place}"
        f"\n  missing: {_wait(stream, access)}, before it allocates again; or record_stream."
    )


def _did(access: Access, is_write: bool) -> str:
    return f"{access.name} on {access.stream.name} {'writes' if is_write else 'reads'} it"


def _said(access: Access) -> str:
    return f"{access.name} on {access.stream.name}, at {access.place}"


def _wait(waiting: str, old: Access) -> str:
    return f"{waiting} must wait for {old.stream.name}"
