"""What a simulated device has in memory, allocation by allocation, and what it has at the peak of a step.

Every tensor that an operator makes, and every storage that Shoal resizes, is an allocation; it ends when the last
tensor of the storage is gone. What Shoal allocates has the kind of the ledger (``shoal.streams.name_memory``). Of the
rest, what the optimizer's step allocates and keeps is optimizer state; what forward and backward allocate is
activations.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import torch

from shoal.simulation.allocator import Block, CachingAllocator
from shoal.text import format_bytes, table

ACTIVATION, WORKSPACE, OPTIMIZER_STATE, GATHERED = "activation", "workspace", "optimizer state", "gathered"
ROUNDING = "rounding"  # of the allocator


@dataclass(eq=False)
class Allocation:
    """Memory of one storage.

    Attributes: ``size``: of its block, in bytes.
    """

    nbytes: int
    size: int
    kind: str
    block: Block


@dataclass(frozen=True)
class MemoryPeak:
    """The most that the device had in a step.

    Attributes: ``allocated``, ``reserved``: bytes as ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``
    give them; the two need not be of the same moment. ``by_kind``: of ``allocated``. ``operation``, ``place``: that
    allocated last before, and the line of Python that asked for it. ``is_beyond``: the device has less.
    """

    allocated: int
    reserved: int
    by_kind: dict[str, int]
    operation: str
    place: str
    is_beyond: bool = False

    def report(self, capacity: int | None) -> str:
        """The peak as a table, the largest kind first. ``capacity``: bytes of the device, None: no limit."""
        ordered = sorted(self.by_kind.items(), key=lambda item: -item[1])
        rows = [[kind, format_bytes(nbytes)] for kind, nbytes in ordered if nbytes]
        rows += [["allocated", format_bytes(self.allocated)], ["reserved", format_bytes(self.reserved)]]
        lines = [table(rows, ["memory at the peak", "bytes"]), f"peak at: {self.operation or 'the begin of the step'}"]
        if self.place:
            lines.append(f"  {self.place}")
        if capacity is not None and self.is_beyond:
            lines.append(f"OUT OF MEMORY: the device has {format_bytes(capacity)}.")
        elif capacity is not None:
            lines.append(
                f"the device has {format_bytes(capacity)}, {format_bytes(capacity - self.reserved)} of it free"
            )
        return "\n".join(lines)


@dataclass
class DeviceMemory:
    """The memory of one device.

    Args:
        capacity: bytes that tensors may have; None: no limit.
    """

    capacity: int | None = None
    allocator: CachingAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.allocator = CachingAllocator(self.capacity)
        self._live: dict[Hashable, Allocation] = {}
        self._references: dict[Hashable, weakref.ref[torch.UntypedStorage]] = {}
        self._events: list[tuple[Allocation, bool]] = []  # since the step began; True: it was allocated
        self._before: list[Allocation] = []  # when the step began
        self._peak = (0, 0, "", "")  # allocated bytes, the number of events before, operation, place
        self._reserved = 0

    # what happens

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, stream: object, kind: str) -> None:
        """A storage got memory.

        Args:
            nbytes: 0: none.
        """
        key = storage._cdata
        self.free(key)
        if not nbytes:
            return
        block = self.allocator.allocate(nbytes, stream)
        made = Allocation(nbytes, block.nbytes, kind, block)
        self._live[key] = made
        self._references[key] = weakref.ref(storage, partial(self._expired, key))
        self._events.append((made, True))

    def note_peak(self, what: str, place: str) -> None:
        """After what one operation allocates."""
        if self.allocator.allocated > self._peak[0]:
            self._peak = (self.allocator.allocated, len(self._events), what, place)
        self._reserved = max(self._reserved, self.allocator.reserved)

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
        self._peak = (self.allocator.allocated, 0, "", "")
        self._reserved = self.allocator.reserved

    def peak(self) -> MemoryPeak:
        """The step has ended: its peak."""
        for kept in self._live.values():
            if kept.kind == WORKSPACE:
                kept.kind = OPTIMIZER_STATE
        allocated, number, operation, place = self._peak
        there = dict.fromkeys(self._before)
        for made, is_new in self._events[:number]:
            if is_new:
                there[made] = None
            else:
                there.pop(made, None)
        by_kind: dict[str, int] = {}
        for each in there:
            for kind, nbytes in ((each.kind, each.nbytes), (ROUNDING, each.size - each.nbytes)):
                by_kind[kind] = by_kind.get(kind, 0) + nbytes
        return MemoryPeak(allocated, self._reserved, by_kind, operation, place, self.allocator.has_failed)
