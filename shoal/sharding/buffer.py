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

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import torch

from shoal.comm.protocol import Communicator, FinishedWork, StagedWork, Work
from shoal.comm.two_level import TwoLevels
from shoal.comm.wire import Wire
from shoal.memory.transfer import clipped
from shoal.sharding.copied_gather import gather_ranges
from shoal.sharding.layout import BufferLayout, Ranges
from shoal.sharding.placement import Move, Placement, Tier, moves
from shoal.sharding.sparse_sum import SparseSum
from shoal.sharding.storage import ByteRanges, DeviceStorage, ShardStorage
from shoal.streams import MemoryPool, resize_storage

Axis: TypeAlias = Communicator | TwoLevels | SparseSum  # what moves a buffer along one mesh axis
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
        self.pool = pool

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
                all_gather = partial(self.comm.all_gather, label=self.label)
                return gather_ranges(self.storage, self.full, self.comm, ranges, all_gather)
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
            if not self.is_sharded:
                return axis.all_gather(self.full, label=label, wire=encoded)
            return self.storage.gather(self.full, self.comm, partial(axis.all_gather, label=label, wire=encoded))
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
        begin = full.storage_offset()
        self.views = [full.as_strided(spec.shape, spec.strides, begin + spec.offset) for spec in self.layout.specs]

    def store(self, values: torch.Tensor, tier: type[ShardStorage] = DeviceStorage) -> None:
        """Take this memory for what is stored: of a sharded buffer on any tier. Shape: [stored numel]."""
        if self.is_sharded:
            self.storage = tier(values)
        else:
            self.set_full(values)

    def allocate(self) -> None:
        """Allocate what the next gather needs, on the current stream."""
        resize_storage(self.full.untyped_storage(), self.nbytes, self.pool)
        self.storage.allocate(self.full, self.comm)

    def free(self) -> None:
        """Free the whole buffer of a sharded one, which is not in use."""
        resize_storage(self.full.untyped_storage(), 0)
        self.storage.free()

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
