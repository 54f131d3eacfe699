"""What a simulated device has in memory, allocation by allocation, and what it has at the peak of a step.

Every tensor that an operator makes, and every storage that Shoal resizes, is an allocation; it ends when the last
tensor of the storage is gone. What Shoal allocates has the kind of the ledger (``shoal.streams.name_memory``). Of the
rest, what the optimizer's step allocates and keeps is optimizer state; what forward and backward allocate is
activations.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from shoal.text import format_bytes, table

ACTIVATION, WORKSPACE, OPTIMIZER_STATE, GATHERED = "activation", "workspace", "optimizer state", "gathered"
ROUNDING = "rounding"  # of the allocator
CUBLAS, CONTEXT, NCCL, PROCESS = "cuBLAS", "CUDA context", "NCCL", "process"


@dataclass(eq=False)
class Allocation:
    """Memory of one storage.

    Attributes: ``size``: of its block, in bytes.
    """

    nbytes: int
    size: int
    kind: str
    block: MemoryBlock


@dataclass(frozen=True)
class MemoryPeak:
    """The most that the device had in a step.

    Attributes: ``allocated``, ``reserved``: bytes as ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``
    give them; the two need not be of the same moment. ``by_kind``: of ``allocated``. ``operation``, ``place``: that
    allocated last before, and the line of Python that asked for it. ``is_beyond``: the device has less. ``outside``:
    bytes that are not PyTorch's, by kind. ``in_graphs``: bytes that CUDA graphs keep from all else, see
    ``kept_by_graphs``; they are in neither of the two.
    """

    allocated: int
    reserved: int
    by_kind: dict[str, int]
    operation: str
    place: str
    is_beyond: bool = False
    outside: dict[str, int] = field(default_factory=dict)
    in_graphs: int = 0

    @property
    def device_nbytes(self) -> int:
        """As ``nvidia-smi`` shows them for the process."""
        return self.reserved + self.in_graphs + sum(self.outside.values())

    def report(self, capacity: int | None) -> str:
        """The peak as a table, the largest kind first. ``capacity``: bytes of the device, None: no limit."""
        ordered = sorted(self.by_kind.items(), key=lambda item: -item[1])
        rows = [[kind, format_bytes(nbytes)] for kind, nbytes in ordered if nbytes]
        rows += [["allocated", format_bytes(self.allocated)], ["reserved", format_bytes(self.reserved)]]
        others = {"kept by CUDA graphs": self.in_graphs, **self.outside}
        rows += [[kind, format_bytes(nbytes)] for kind, nbytes in others.items() if nbytes]
        rows.append(["in all", format_bytes(self.device_nbytes)])
        lines = [table(rows, ["memory at the peak", "bytes"]), f"peak at: {self.operation or 'the begin of the step'}"]
        if self.place:
            lines.append(f"  {self.place}")
        if capacity is not None and self.is_beyond:
            lines.append(f"OUT OF MEMORY: the device has {format_bytes(capacity)}.")
        elif capacity is not None:
            lines.append(
                f"the device has {format_bytes(capacity)}, {format_bytes(capacity - self.device_nbytes)} of it free"
            )
        return "\n".join(lines)


class DeviceMemory:
    """The memory of one device.

    Args:
        capacity: bytes of the device; None: no limit.
        context_nbytes: of them, those of the CUDA context; of a CPU rank, those of its process without a model.
        is_cpu: it is the memory of a process that computes on the CPU.

    Attributes: ``outside``: bytes that are not PyTorch's, by kind. ``now``: the time for ``history``.
    ``has_cuda_graphs``: activations are those of CUDA graphs.
    """

    def __init__(self, capacity: int | None = None, context_nbytes: int = 0, *, is_cpu: bool = False) -> None:
        self.allocator = ProcessAllocator(capacity) if is_cpu else CachingAllocator(capacity)
        self.outside: dict[str, int] = {}
        self.add_outside(PROCESS if is_cpu else CONTEXT, context_nbytes)
        self._live: dict[Hashable, Allocation] = {}
        self._references: dict[Hashable, weakref.ref[torch.UntypedStorage]] = {}
        self._events: list[tuple[Allocation, bool]] = []  # since the step began; True: it was allocated
        self._before: list[Allocation] = []  # when the step began
        self._peaks: dict[tuple[str, str], tuple[int, int]] = {}  # by operation, place: allocated, events before
        self._reserved = 0
        self.has_cuda_graphs = False
        self.now: Callable[[], float] = lambda: 0.0
        self.history: list[tuple[float, int, int]] = []  # seconds, bytes allocated and reserved, after each operation

    # what happens

    def allocate(
        self, storage: torch.UntypedStorage, nbytes: int, stream: object, kind: str, apart: object = None
    ) -> None:
        """A storage got memory.

        Args:
            nbytes: 0: none.
            apart: as of ``CachingAllocator.allocate``.
        """
        key = storage._cdata
        self.free(key)
        if not nbytes:
            return
        block = self.allocator.allocate(nbytes, stream, apart)
        made = Allocation(nbytes, block.nbytes, kind, block)
        self._live[key] = made
        self._references[key] = weakref.ref(storage, partial(self._expired, key))
        self._events.append((made, True))

    def add_outside(self, kind: str, nbytes: int) -> None:
        """Memory is allocated that is not PyTorch's, and stays."""
        self.outside[kind] = self.outside.get(kind, 0) + nbytes
        if self.allocator.capacity is not None:
            self.allocator.capacity -= nbytes

    def add_workspace(self, stream: object, nbytes: int) -> None:
        """A product runs on a stream: its first one allocates what cuBLAS works in, which stays."""
        key = ("workspace", stream)
        if key not in self._live and nbytes:
            block = self.allocator.allocate(nbytes, stream)
            self._live[key] = Allocation(nbytes, block.nbytes, CUBLAS, block)
            self._events.append((self._live[key], True))

    def note_peak(self, what: str, place: str) -> None:
        """After what one operation allocates."""
        if self.allocator.allocated > self._peaks.get((what, place), (0, 0))[0]:
            self._peaks[what, place] = (self.allocator.allocated, len(self._events))
        self._reserved = max(self._reserved, self.allocator.reserved)
        self.history.append((self.now(), self.allocator.allocated, self.allocator.reserved))

    def _expired(self, key: Hashable, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if self._references.get(key) is reference:
            self.free(key)

    def free(self, key: Hashable) -> None:
        """A storage lost its memory."""
        gone = self._live.pop(key, None)
        self._references.pop(key, None)
        if gone is not None:
            self.allocator.free(gone.block)
            self._events.append((gone, False))

    def set_kind(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Memory is of this kind."""
        if (found := self._live.get(storage._cdata)) is not None:
            found.kind = kind

    # steps

    def start(self) -> None:
        """A step begins: forget the peak."""
        self._events.clear()
        self._before = list(self._live.values())
        self._peaks = {("", ""): (self.allocator.allocated, 0)}
        self._reserved = self.allocator.reserved

    def peaks(self) -> dict[tuple[str, str], MemoryPeak]:
        """The step has ended: its peak at each place, by operation and line."""
        for kept in self._live.values():
            if kept.kind == WORKSPACE:
                kept.kind = OPTIMIZER_STATE
        by_kind: dict[str, int] = {}

        def add(each: Allocation, sign: int) -> None:
            for kind, nbytes in ((each.kind, each.nbytes), (ROUNDING, each.size - each.nbytes)):
                by_kind[kind] = by_kind.get(kind, 0) + sign * nbytes

        for each in self._before:
            add(each, 1)
        reached, made = 0, {}
        for at, (allocated, number) in sorted(self._peaks.items(), key=lambda item: item[1][1]):
            for each, is_new in self._events[reached:number]:
                add(each, 1 if is_new else -1)
            reached = number
            there = {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}
            made[at] = MemoryPeak(allocated, self._reserved, there, *at, self.allocator.has_failed, dict(self.outside))
        in_graphs = kept_by_graphs(peak.by_kind for peak in made.values()) if self.has_cuda_graphs else 0
        room = self.allocator.capacity
        is_beyond = self.allocator.has_failed or (room is not None and self._reserved + in_graphs > room)
        return {at: replace(peak, is_beyond=is_beyond, in_graphs=in_graphs) for at, peak in made.items()}


def kept_by_graphs(moments: Iterable[Mapping[str, float]]) -> int:
    """What CUDA graphs keep of the device's memory beyond the peak of a step: an upper estimate, in bytes.

    PyTorch has what forward and backward allocate in one pool of all graphs, which gives it to nothing else while the
    graphs exist (``torch/_inductor/cudagraph_trees.py``, ``cuda_graphs_thread_pool``). So activations take their most,
    all else its most, at whatever moments these are. Not counted: copies of inputs, and recordings for other shapes.

    Args:
        moments: the bytes allocated at each, by kind.
    """
    most = [0.0, 0.0, 0.0]
    for by_kind in moments:
        in_all, of_graphs = sum(by_kind.values()), by_kind.get(ACTIVATION, 0)
        most = [max(pair) for pair in zip(most, (of_graphs, in_all - of_graphs, in_all), strict=True)]
    return round(most[0] + most[1] - most[2])


# The allocator: where each tensor would lie, and what is reserved for it.
#
#     request       rounded up to 512 bytes
#     up to 1 MiB   from segments of 2 MiB
#     below 10 MiB  from segments of 20 MiB
#     larger        from a segment of its own size, rounded up to 2 MiB
#     free block    the smallest that fits, of the same stream; what is left of it is split off, where it is worth it
#     free          neighbours that are free become one block; segments stay reserved
#     pools apart   have segments of their own, which are not divided and not given back
#
# Where the device has no room for a segment, segments that are free as a whole are given back first.
# Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11, with its default settings.

_MIN_BLOCK = 512
_SMALL = 1 << 20  # the largest request that is served from small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20
_ROUND_SEGMENT = 2 << 20


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment. Addresses are made up, and grow with each segment."""

    nbytes: int
    address: int
    pool: tuple[object, bool, object]  # the stream, True for small requests, and the pool apart
    is_free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None

    def __lt__(self, other: MemoryBlock) -> bool:
        return (self.nbytes, self.address) < (other.nbytes, other.address)

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class CachingAllocator:
    """The memory of one device.

    Args:
        capacity: bytes that segments may have in all; None: no limit.

    Attributes: ``allocated``, ``reserved``: bytes in blocks in use, and in segments. ``has_failed``: a segment had no
    room; it was made in spite of that, so that what is missing can be told.
    """

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0
    has_failed: bool = False
    _free: dict[tuple[object, bool, object], list[MemoryBlock]] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, nbytes: int, stream: object, apart: object = None) -> MemoryBlock:
        """A block of at least ``nbytes``, more than 0, for what ``stream`` computes.

        Args:
            apart: a pool with segments of its own; None: the one of all other memory.
        """
        size = max(-(-nbytes // _MIN_BLOCK) * _MIN_BLOCK, _MIN_BLOCK)
        pool = (stream, size <= _SMALL, apart)
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, MemoryBlock(size, -1, pool))
        block = free.pop(at) if at < len(free) else self._segment(size, pool)
        block.is_free = False
        self._split(block, size)
        self.allocated += block.nbytes
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give a block back."""
        self.allocated -= block.nbytes
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block = self._joined(*sorted((block, other), key=lambda each: each.address))
        block.is_free = True
        insort(self._free[block.pool], block)

    def release_cached(self) -> None:
        """Give free segments back to the device, as ``torch.cuda.empty_cache()`` does."""
        for (_, _, apart), free in self._free.items():
            if apart is not None:
                continue
            self.reserved -= sum(block.nbytes for block in free if block.is_segment)
            free[:] = [block for block in free if not block.is_segment]

    def free_nbytes(self, apart: object) -> int:
        """Bytes of the free segments of a pool apart."""
        return sum(block.nbytes for (_, _, pool), free in self._free.items() if pool is apart for block in free)

    def _segment(self, size: int, pool: tuple[object, bool, object]) -> MemoryBlock:
        nbytes = _segment_size(size)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.release_cached()
            self.has_failed = self.has_failed or self.reserved + nbytes > self.capacity
        self.reserved += nbytes
        block = MemoryBlock(nbytes, self._next_address, pool)
        self._next_address += nbytes
        return block

    def _split(self, block: MemoryBlock, size: int) -> None:
        left = block.nbytes - size
        _, is_small, apart = block.pool
        if apart is not None or (left < _MIN_BLOCK if is_small else left <= _SMALL):
            return
        rest = MemoryBlock(left, block.address + size, block.pool, is_free=True, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.nbytes, block.after = size, rest
        insort(self._free[block.pool], rest)

    def _joined(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _remove(self, block: MemoryBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, block)]


@dataclass
class ProcessAllocator(CachingAllocator):
    """The memory of a process that computes on the CPU: the C library returns to the kernel what is freed.

    With ``host_heap`` it stays with the process instead; how much that is depends on small blocks that lie between.
    """

    def allocate(self, nbytes: int, stream: object, apart: object = None) -> MemoryBlock:
        size = -(-nbytes // _MIN_BLOCK) * _MIN_BLOCK
        self.allocated += size
        self.reserved = self.allocated
        self.has_failed = self.has_failed or (self.capacity is not None and self.allocated > self.capacity)
        return MemoryBlock(size, 0, (stream, False, apart))

    def free(self, block: MemoryBlock) -> None:
        self.allocated -= block.nbytes
        self.reserved = self.allocated


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
