"""A flat buffer and its one verb: ``redistribute`` moves it from one placement to another.

Parameters, gradients, staging buffers and hpZ's second shard are buffers of this one class. Its state is its placement
(how it is spread over the mesh now) and its storage (where this rank's shard is):

    full     the whole buffer, on the device: the values where no axis shards
    shard    this rank's range, in its ``storage``: the values where one does. Of a buffer that is stored whole it is a
             view of ``full``

The whole buffer of a sharded one is filled in place by a gather. A release resizes its storage to zero but keeps every
tensor object alive, so a view that autograd saved is valid again after the next gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol, TypeAlias

import torch

from shoal.comm.protocol import Communicator, FinishedWork, StagedWork, Work
from shoal.comm.side_stream import CopyDone
from shoal.comm.wire import Wire
from shoal.memory.host import round_up
from shoal.memory.stream_copies import StreamCopies
from shoal.memory.transfer import clipped
from shoal.sharding.layout import ALIGNMENT, BufferLayout, Ranges, Segment
from shoal.sharding.placement import Move, Placement, Tier, moves
from shoal.sharding.storage import ByteRanges, DeviceStorage, ShardStorage
from shoal.streams import MemoryPool, keep_for_current_stream, resize_storage


class Axis(Protocol):
    """What moves a buffer along one mesh axis: a ``Communicator``, or ``SparseSum``."""

    rank: int
    size: int

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: Wire | None = None
    ) -> Work: ...
    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str, wire: Wire | None = None) -> Work: ...
    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: Wire | None = None,
    ) -> Work: ...


Wires: TypeAlias = Mapping[str, Wire]  # by axis


class FlatBuffer:
    """One flat tensor of a parameter group, spread over mesh axes.

    Args:
        layout: where each parameter lies.
        comm: the ranks along the axis that shards it, ``layout.num_shards`` where it, or optimizer state, is sharded.
        axes: by axis name, what moves the buffer along it. An axis that is not named here has one rank.
        stored: the placement between uses, in which it begins.
        owned: the placement of what this rank's optimizer owns: its range (``begin`` to ``end``), or the whole.
        full: the whole buffer, in memory whose size may change where ``stored`` shards. Shape: [numel]. None: there is
            none yet.
        storage: of the shard of a buffer that is stored so; None: there is no memory yet.
        copies: copies a shard in host memory to the device, concurrently to its work; None: the current stream does.
        pool: in which the whole of a sharded buffer is allocated; None: with all other memory.
    """

    def __init__(
        self,
        label: str,
        layout: BufferLayout,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        axes: Mapping[str, Axis],
        stored: Placement,
        *,
        owned: Placement | None = None,
        full: torch.Tensor | None = None,
        storage: ShardStorage | None = None,
        copies: StreamCopies | None = None,
        pool: MemoryPool | None = None,
    ) -> None:
        self.label = label
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.comm = comm
        self.axes = axes
        self.stored = stored
        self.owned = stored if owned is None else owned
        self.is_sharded = stored.is_sharded  # each rank stores its range only
        self.placement = stored
        self.begin, self.end = layout.owned(comm.rank) if self.owned.is_sharded else (0, layout.numel)
        self.full = torch.empty(0, dtype=dtype, device=device)
        self.views: list[torch.Tensor] = []
        self.storage = DeviceStorage(self.full) if storage is None else storage
        if full is not None:
            self.set_full(full)
        self.reader: Work | None = None  # the last collective that peers read it for
        self._copies = copies
        self.pool = pool
        self._staged: torch.Tensor | None = None  # on the device, for the next gather of an offloaded shard

    # what it is

    @property
    def is_offloaded(self) -> bool:
        """True if the shard is copied to the device before a use."""
        return self.storage.tier is not Tier.DEVICE

    @property
    def shard(self) -> torch.Tensor:
        """This rank's owned range. On a disk: a placeholder, unless it is pinned. Shape: [owned numel]."""
        return self.storage.values

    @property
    def memory(self) -> torch.Tensor:
        """Where the values are."""
        return self.shard if self.placement.is_sharded else self.full

    @property
    def stored_values(self) -> torch.Tensor:
        """What this rank stores between uses: its range, or the whole."""
        return self.shard if self.is_sharded else self.full

    @property
    def stored_numel(self) -> int:
        """Elements of it."""
        return self.owned_numel if self.is_sharded else self.layout.numel

    @property
    def has_memory(self) -> bool:
        """True if there is a whole buffer."""
        return bool(self.full.numel())

    @property
    def owned_numel(self) -> int:
        """Elements of this rank's range, padding included."""
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def nbytes_stored(self) -> int:
        """Bytes that this rank stores between uses, on whatever tier."""
        return self.stored_numel * self.dtype.itemsize

    def owned_part(self, slot: int) -> Segment | None:
        """The part of one parameter that lies in this rank's owned range; None: there is none."""
        spec = self.layout.specs[slot]
        low, high = max(spec.offset, self.begin), min(spec.offset + spec.numel, self.end)
        return Segment(slot, low - self.begin, high - self.begin, low - spec.offset) if low < high else None

    # between placements

    def redistribute(
        self,
        to: Placement,
        *,
        ranges: Ranges | None = None,
        into: torch.Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
        wire: Wires | None = None,
    ) -> Work:
        """Move the values to another placement. Does not block the host.

        Args:
            ranges: of a gather: the ranges of the buffer that move, which all ranks name; others are NaN. None: all.
            into: memory of the range that results, in place of ``shard``.
            scale: the sum over the first axis is multiplied by it.
            accumulate: a reduce-scatter adds to the range.
            wire: by axis, how its collective encodes what it sends; of an axis without an entry nothing is encoded.
                A gather of ``ranges`` encodes nothing.

        Raises: PlacementError: on some axis no single collective leads from here to ``to``.
        Communicates: per axis whose placement changes the collective that ``placement.moves`` names.
        Memory: a gather of a sharded buffer allocates the whole, on the device, until ``release()``.
        Order: the source must not be written before ``wait()``; peers may read it until ``drain()``.
        """
        todo = tuple(move for move in moves(self.placement, to) if move.axis in self.axes)
        self.placement = to
        if not todo:
            return FinishedWork(self.memory)
        if self.is_sharded and not to.is_sharded:
            resize_storage(self.full.untyped_storage(), self.nbytes, self.pool)
            if ranges is not None:
                return self._gather_ranges(ranges)
        first = partial(self.issue, todo[0], into, scale=scale, accumulate=accumulate, wire=wire)
        if len(todo) == 1:
            return first()

        def after(index: int, before: Work) -> Work:
            """Issue a move: all but the second one overwrite what peers read for the one before."""
            if index > 1 or todo[0].collective == "all_reduce":
                before.drain()
            else:
                before.wait()
            return self.issue(todo[index], into, wire=wire)

        return _InPlace(self.comm.side_stream(self.full), first, *(partial(after, i) for i in range(1, len(todo))))

    def issue(
        self,
        move: Move,
        into: torch.Tensor | None,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        wire: Wires | None = None,
    ) -> Work:
        """Start one move. Called by ``redistribute`` alone."""
        axis, label = self.axes[move.axis], self.label
        encoded = None if wire is None else wire.get(move.axis)
        if move.collective == "all_gather":
            if self.is_offloaded:
                return self._gather_offloaded(axis, encoded)
            return axis.all_gather(self.full, self.shard if self.is_sharded else None, label=label, wire=encoded)
        if move.collective == "reduce_scatter":
            out = self.shard if into is None else into
            return axis.reduce_scatter(self.full, out, scale=scale, accumulate=accumulate, label=label, wire=encoded)
        if move.collective == "all_reduce":
            memory = self.memory if into is None or not self.placement.is_sharded else into
            return axis.all_reduce(memory, scale=scale, label=label, wire=encoded)
        if self.is_sharded:
            numel = self.shard.numel()
            self.shard.copy_(self.full[axis.rank * numel : (axis.rank + 1) * numel])
        return FinishedWork(self.memory)

    def sum_like(self, values: torch.Tensor, axes: Mapping[str, Axis], placed: Placement, scale: float = 1.0) -> None:
        """Sum other values of this layout over the ranks, in place, times ``scale``. Blocks until no peer reads them.

        Args:
            values: Shape: [numel]. ``placed``: Partial over the axes to sum over.
        """
        whole = FlatBuffer(self.label, self.layout, values.dtype, self.device, self.comm, axes, placed, full=values)
        whole.redistribute(Placement(), scale=scale).drain()

    def assume(self, placement: Placement) -> None:
        """The values have been, or are about to be, overwritten: this is their placement. Communicates nothing."""
        self.placement = placement

    def _gather_offloaded(self, axis: Axis, wire: Wire | None) -> Work:
        """Copy the shard to the device and gather it. The current stream waits for neither before ``Work.wait()``."""
        # A tensor of its own: peers may read it after the full buffer was released.
        staged, self._staged = self._staged, None
        if staged is None and axis.size > 1:
            staged = self.comm.empty(self.owned_numel, self.dtype, self.device)
        # The all-gather is issued where the copy is queued: it starts after the copy, not after the device's work.
        with self._copies.queued() if self._copies is not None else nullcontext(CopyDone()) as copied:
            with self.storage.resident(is_read_only=True):
                (self.full if staged is None else staged).copy_(self.shard, non_blocking=True)
            work = axis.all_gather(self.full, staged, label=self.label, wire=wire)
        return _GatherAfterCopy(work, copied, staged)

    def _gather_ranges(self, ranges: Ranges) -> Work:
        """Gather ranges of the buffer only. The current stream waits for nothing before ``Work.wait()``."""
        owned = [clipped(ranges, *self.layout.owned(rank)) for rank in range(self.comm.size)]
        mine = [(start - self.begin, stop - self.begin) for start, stop in owned[self.comm.rank]]
        numel = round_up(max(sum(stop - start for start, stop in each) for each in owned), ALIGNMENT)
        self.full.fill_(float("nan"))
        staged = gathered = self.full
        if self.comm.size > 1:
            staged = self.comm.empty(numel, self.dtype, self.device)
            gathered = self.comm.empty(numel * self.comm.size, self.dtype, self.device)
        work: Work = FinishedWork(self.full)
        with self._copies.queued() if self._copies is not None else nullcontext(CopyDone()) as copied:
            with self.storage.resident(is_read_only=True, ranges=self.bytes_of(ranges)):
                at = 0
                for start, stop in mine:
                    at = at if self.comm.size > 1 else start
                    staged[at : at + stop - start].copy_(self.shard[start:stop], non_blocking=True)
                    at += stop - start
            if self.comm.size > 1:
                work = self.comm.all_gather(gathered, staged, label=self.label)
        work = _GatherAfterCopy(work, copied, staged)
        return work if self.comm.size == 1 else _GatherOfRanges(work, gathered, owned, self.full)

    def bytes_of(self, ranges: Ranges | None) -> ByteRanges | None:
        """Where ranges of the buffer lie in this rank's shard, in bytes; None: all of it."""
        if ranges is None:
            return None
        size = self.dtype.itemsize
        owned = clipped(ranges, self.begin, self.end)
        return [((start - self.begin) * size, (stop - self.begin) * size) for start, stop in owned]

    # memory

    def wait_for_reader(self) -> None:
        """Wait until no peer reads the memory. Waiting for the whole axis would wait for the slowest rank."""
        if self.reader is not None:
            self.reader.drain()
            self.reader = None

    def wait_for_peers(self) -> None:
        """Wait until no peer reads this rank's values: they may be written in place."""
        self.comm.drain()

    def set_full(self, full: torch.Tensor) -> None:
        """Take this memory for the whole buffer. Shape: [numel]."""
        self.full = full
        if not self.is_sharded:
            self.storage = DeviceStorage(full[self.begin : self.end])
        self.views = [full[spec.offset : spec.offset + spec.numel].view(spec.shape) for spec in self.layout.specs]

    def store(self, values: torch.Tensor, tier: type[ShardStorage] = DeviceStorage) -> None:
        """Take this memory for what is stored: of a sharded buffer on any tier. Shape: [stored numel]."""
        if self.is_sharded:
            self.storage = tier(values)
        else:
            self.set_full(values)

    def allocate(self) -> None:
        """Allocate what the next gather needs, on the current stream."""
        resize_storage(self.full.untyped_storage(), self.nbytes, self.pool)
        if self.is_offloaded and self.comm.size > 1:
            self._staged = self.comm.empty(self.owned_numel, self.dtype, self.device)

    def free(self) -> None:
        """Free the whole buffer of a sharded one, which is not in use."""
        resize_storage(self.full.untyped_storage(), 0)
        self._staged = None

    def release(self, *, keep_user_views: bool = False) -> None:
        """Replicate -> Shard, where the shard has the values already: free the whole buffer. Communicates nothing.

        Args:
            keep_user_views: keep the storage alive for views that the user holds (``parameter.detach()``); the buffer
                allocates new memory at the next gather.
        """
        self.placement = self.stored
        storage = self.full.untyped_storage()
        if keep_user_views and torch._C._storage_Use_Count(storage._cdata) > len(self.views) + 2:
            self.set_full(torch.empty_like(self.full))
        self.free()

    def write_back(self) -> None:
        """Copy this rank's range of the whole buffer into the stored shard, after values were changed in place."""
        if self.is_sharded:
            self.wait_for_peers()
            with self.storage.resident(is_overwritten=True):
                self.shard.copy_(self.full[self.begin : self.end])

    def drop(self) -> None:
        """Give all memory up."""
        self.views = []
        self.full = self.full.new_empty(0)
        self.storage = DeviceStorage(self.full)


class _InPlace(StagedWork):
    """Collectives one after the other, the last of which peers read what it writes.

    Order: after ``wait()`` the result may be overwritten.
    """

    def wait(self) -> torch.Tensor:
        result = super().wait()
        self._works[-1].drain()
        return result


class _GatherAfterCopy:
    """An all-gather whose source is copied to the device first, both concurrently to the current stream.

    Args:
        source: where the shard is copied to; the copy stream may have allocated it.
    """

    def __init__(self, work: Work, copied: CopyDone, source: torch.Tensor | None) -> None:
        self._work = work
        self._copied = copied
        self._source = source

    def wait(self) -> torch.Tensor:
        self._copied.wait()
        result, source = self._work.wait(), self._source
        self._source = None
        if source is not None:
            keep_for_current_stream(source)
        return result

    def drain(self) -> None:
        self.wait()
        self._work.drain()


class _GatherOfRanges:
    """An all-gather of some ranges of a buffer, which lie one after the other in the tensors that move.

    Args:
        gathered: the ranges of each rank, and padding. Shape: [ranks * numel of a rank].
        ranges: of each rank, in ``full``.
    """

    def __init__(
        self, work: Work, gathered: torch.Tensor, ranges: Sequence[Sequence[tuple[int, int]]], full: torch.Tensor
    ) -> None:
        self._gather = work
        self._gathered = gathered
        self._ranges = ranges
        self._full = full

    def wait(self) -> torch.Tensor:
        self._gather.wait()
        ranges_of_ranks, self._ranges = self._ranges, ()
        parts = self._gathered.chunk(len(ranges_of_ranks)) if ranges_of_ranks else ()
        for part, ranges in zip(parts, ranges_of_ranks, strict=True):
            at = 0
            for start, stop in ranges:
                self._full[start:stop].copy_(part[at : at + stop - start])
                at += stop - start
        return self._full

    def drain(self) -> None:
        self.wait()
        self._gather.drain()
