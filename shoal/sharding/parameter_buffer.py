"""The parameters of one group in one flat buffer, of which each parameter is a view.

While it is sharded, the buffer holds this rank's range only. Gathering fills ``full`` in place; releasing resizes its
storage to zero but keeps every tensor object alive, so a view that autograd saved is valid again after the next gather.
Reading a view of an emptied storage would crash the process, so a sharded parameter's data is a placeholder: one NaN
expanded to the true shape (4 bytes, reads as NaN, refuses writes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from shoal.comm.protocol import Communicator, FinishedWork, Work
from shoal.comm.wire import WireFormat
from shoal.memory.disk_store import DiskBuffer, DiskStore
from shoal.memory.host import round_up
from shoal.memory.stream_copies import CopyDone, StreamCopies
from shoal.memory.transfer import Intervals, clipped
from shoal.sharding.buffer import Axis, FlatBuffer
from shoal.sharding.layout import ALIGNMENT, BufferLayout, Ranges, Segment
from shoal.sharding.placement import SHARD, Move, Placement
from shoal.streams import name_memory, resize_storage

HPZ = Placement.of(hpz=SHARD)

# Of each parameter of a buffer, dim 0 is as many equal blocks as this has entries: which of them a forward uses.
Used = tuple[bool, ...]


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of a sharded parameter: its true shape and dtype, one element of memory."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def is_placeholder(data: torch.Tensor) -> bool:
    """True if ``data`` is one element of memory, expanded to a larger shape."""
    return data.numel() > 1 and not any(data.stride())


class _GatherAfterCopy:
    """An all-gather whose source is copied to the device first, both beside the current stream."""

    def __init__(self, work: Work, copied: CopyDone) -> None:
        self._work = work
        self._copied = copied

    def wait(self) -> torch.Tensor:
        self._copied.wait()
        return self._work.wait()

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
        own_ranges, self._ranges = self._ranges, ()
        parts = self._gathered.chunk(len(own_ranges)) if own_ranges else ()
        for part, ranges in zip(parts, own_ranges, strict=True):
            at = 0
            for start, stop in ranges:
                self._full[start:stop].copy_(part[at : at + stop - start])
                at += stop - start
        return self._full

    def drain(self) -> None:
        self.wait()
        self._gather.drain()


class ParameterBuffer(FlatBuffer):
    """The flat buffer of one group's parameters.

    Args:
        layout: where each parameter lies; one spec per entry of ``parameters``.
        axis: the name of the axis that shards; ``comm``: its ranks. Their number is ``layout.num_shards`` where the
            buffer or the optimizer state is sharded.
        stored: the placement between uses. In use it is always Replicate.
        is_sharded: does ``stored`` shard, over more than one rank or away from the device?
        is_state_sharded: this rank's optimizer owns its range (``begin`` to ``end``), not the whole (stage 0).
        hpz: the ranks of a second sharding that the backward pass gathers from (ZeRO++ hpZ, arXiv:2306.10209), or None.
        host: allocates the shard where it is stored in memory apart from the device's; None: on the device.
        disk: where the shard is stored on a disk; ``shard`` is then a placeholder, except inside ``resident_shard()``
            and, until ``unpin_shard()`` is called for the first time, after construction.
        copies: copies a shard in host memory to the device, beside its work; None: the current stream does.
    """

    def __init__(
        self,
        label: str,
        layout: BufferLayout,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        *,
        is_sharded: bool,
        stored: Placement | None = None,
        axis: str = "dp_shard",
        is_state_sharded: bool = True,
        hpz: Communicator | None = None,
        host: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        disk: DiskStore | None = None,
        copies: StreamCopies | None = None,
    ) -> None:
        full = (
            torch.empty(layout.numel, dtype=dtype, device=device)
            if is_sharded
            else comm.empty(layout.numel, dtype, device)
        )
        name_memory(full, f"the parameters of unit {label!r}").zero_()
        super().__init__(label, {axis: comm}, Placement(), full)
        self.layout = layout
        self.dtype = dtype
        self.comm = comm
        self.parameters = list(parameters)
        self.is_sharded = is_sharded
        self.stored = (stored or Placement.of(**{axis: SHARD})) if is_sharded else Placement()
        self.owned = Placement.of(**{axis: SHARD}) if is_state_sharded else Placement()
        self.is_full = True
        begin, end = layout.owned(comm.rank) if is_state_sharded else (0, layout.numel)
        self.begin, self.end = begin, end
        self._storage = full.untyped_storage()
        self._full_nbytes = layout.numel * full.element_size()
        self.views = self._views_of(full)
        self.placeholders = [placeholder(spec.shape, dtype, device) for spec in layout.specs] if is_sharded else []
        self._hpz_comm = hpz
        self._hpz = FlatBuffer(label, {"hpz": hpz}, Placement(), full) if hpz is not None else None
        self._copies = copies
        self._staged: torch.Tensor | None = None  # on the device, for the next gather of an offloaded shard
        self._disk = disk if is_sharded else None
        self._disk_buffer: DiskBuffer | None = None  # the shard's, on the disk
        self._is_changed = False  # since it was fetched from the disk
        self.is_moved = False  # to host memory for a while, by ``move_to_host``
        self.is_shard_offloaded = is_sharded and (host is not None or disk is not None)
        self.shard: torch.Tensor
        if not is_sharded:
            self.shard = full[begin:end]
        elif disk is not None:
            self._disk_buffer = disk.allocate(label, self.nbytes_of_shard)
            self._disk_buffer.pin_count = 1
            self.shard = self._fetched()
        else:
            self.shard = host(end - begin, dtype) if host is not None else comm.empty(end - begin, dtype, device)
        if is_sharded:
            name_memory(self.shard, f"the stored shard of unit {label!r}")

    def _views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full[spec.offset : spec.offset + spec.numel].view(spec.shape) for spec in self.layout.specs]

    def owned_part(self, slot: int) -> Segment | None:
        """The part of one parameter that lies in this rank's owned range; None: there is none."""
        spec = self.layout.specs[slot]
        low, high = max(spec.offset, self.begin), min(spec.offset + spec.numel, self.end)
        return Segment(slot, low - self.begin, high - self.begin, low - spec.offset) if low < high else None

    @property
    def nbytes_of_shard(self) -> int:
        return (self.end - self.begin) * self.full.element_size()

    @property
    def nbytes_stored(self) -> int:
        """Bytes of parameters held between steps, on whatever tier."""
        return self.nbytes_of_shard if self.is_sharded else self._full_nbytes

    @property
    def is_on_disk(self) -> bool:
        """True if the shard is stored on a disk."""
        return self._disk_buffer is not None

    @property
    def nbytes_hpz(self) -> int:
        """Bytes of the second shard."""
        return 0 if self._hpz is None or self._hpz.shard is None else self._hpz.shard.nbytes

    @property
    def owned_parameters(self) -> torch.Tensor:
        """The range of the parameters that this rank's optimizer owns. Shape: [owned numel]."""
        return self.shard if self.is_sharded else self.full[self.begin : self.end]

    # between the stored placement and Replicate

    def allocate(self) -> None:
        """Allocate what ``gather`` needs, on the current stream."""
        resize_storage(self._storage, self._full_nbytes)
        if self.is_shard_offloaded and self.comm.size > 1:
            self._staged = self.comm.empty(self.shard.numel(), self.dtype, self.full.device)

    def free(self) -> None:
        """Free the full buffer, which is not in use."""
        resize_storage(self._storage, 0)
        self._staged = None

    def gather(self, *, from_hpz: bool = False, used: Used | None = None) -> Work:
        """Shard -> Replicate. The parameters may be read after ``Work.wait()`` and ``attach_views()``.

        Args:
            used: which blocks of the parameters; others are NaN. None: all.

        Communicates: one all-gather on the axis that shards (``from_hpz``: on that of the second sharding); of
            blocks, one of the rank's largest part of them, if that is less.
        Memory: the whole buffer on the device until ``release()``.
        """
        resize_storage(self._storage, self._full_nbytes)
        self.is_full = True
        if used is not None and (ranges := self._ranges_of(used)) is not None:
            self.placement = Placement()
            return self._gather_ranges(ranges)
        if from_hpz and self._hpz is not None and self._hpz.shard is not None:
            self.placement = Placement()
            self._hpz.full, self._hpz.placement = self.full, HPZ
            return self._hpz.redistribute(Placement())
        return self.redistribute(Placement())

    def update_replicas(self) -> Work:
        """After the optimizer has updated this rank's range of the whole buffer: bring all ranges up to date.

        Communicates: one all-gather where optimizer state is sharded and parameters are not, else nothing.
        """
        if self.is_sharded or self.comm.size == 1:
            return FinishedWork(self.full)
        self.placement = self.owned
        return self.redistribute(Placement())

    def issue(
        self, move: Move, *, scale: float = 1.0, accumulate: bool = False, wire: WireFormat | None = None
    ) -> Work:
        if move.collective != "all_gather":
            return super().issue(move, scale=scale, accumulate=accumulate, wire=wire)
        axis = self.axes[move.axis]
        if self.is_sharded and self.is_shard_offloaded:
            return self._gather_offloaded(axis, wire)
        return axis.all_gather(self.full, self.shard if self.is_sharded else None, label=self.label, wire=wire)

    def _gather_offloaded(self, axis: Axis, wire: WireFormat | None) -> Work:
        """Copy the shard to the device and gather it. The current stream waits for neither before ``Work.wait()``."""
        # A tensor of its own: peers may read it after the full buffer was released.
        staged, self._staged = self._staged, None
        if staged is None and axis.size > 1:
            staged = self.comm.empty(self.shard.numel(), self.dtype, self.full.device)
        # The all-gather is issued where the copy is queued: it starts after the copy, not after the device's work.
        with self._copies.queued() if self._copies is not None else nullcontext(CopyDone()) as copied:
            with self.resident_shard(is_read_only=True):
                (self.full if staged is None else staged).copy_(self.shard, non_blocking=True)
            work = axis.all_gather(self.full, staged, label=self.label, wire=wire)
        return _GatherAfterCopy(work, copied)

    def _ranges_of(self, used: Used) -> Ranges | None:
        """Where blocks of the parameters lie in the buffer; None: they are all."""
        if all(used):
            return None
        ranges = Intervals()
        for spec in self.layout.specs:
            numel = spec.numel // len(used)
            for place, is_used in enumerate(used):
                if is_used:
                    ranges.add(spec.offset + place * numel, spec.offset + (place + 1) * numel)
        return tuple(ranges.ranges)

    def _owned_nbytes(self, used: Used | None) -> Ranges | None:
        """Where blocks lie in this rank's shard, in bytes; None: all of it."""
        ranges = None if used is None else self._ranges_of(used)
        if ranges is None:
            return None
        size = self.full.element_size()
        own = clipped(ranges, self.begin, self.end)
        return tuple(((start - self.begin) * size, (stop - self.begin) * size) for start, stop in own)

    def _gather_ranges(self, ranges: Ranges) -> Work:
        """Gather ranges of the buffer only. The current stream waits for nothing before ``Work.wait()``."""
        owned = [clipped(ranges, *self.layout.owned(rank)) for rank in range(self.comm.size)]
        own = [(start - self.begin, stop - self.begin) for start, stop in owned[self.comm.rank]]
        numel = round_up(max(sum(stop - start for start, stop in each) for each in owned), ALIGNMENT)
        size = self.full.element_size()
        self.full.fill_(float("nan"))
        staged = gathered = self.full
        if self.comm.size > 1:
            staged = self.comm.empty(numel, self.dtype, self.full.device)
            gathered = self.comm.empty(numel * self.comm.size, self.dtype, self.full.device)
        work: Work = FinishedWork(self.full)
        with self._copies.queued() if self._copies is not None else nullcontext(CopyDone()) as copied:
            with self.resident_shard(is_read_only=True, ranges=[(start * size, stop * size) for start, stop in own]):
                at = 0
                for start, stop in own:
                    at = at if self.comm.size > 1 else start
                    staged[at : at + stop - start].copy_(self.shard[start:stop], non_blocking=True)
                    at += stop - start
            if self.comm.size > 1:
                work = self.comm.all_gather(gathered, staged, label=self.label)
        work = _GatherAfterCopy(work, copied)
        return work if self.comm.size == 1 else _GatherOfRanges(work, gathered, owned, self.full)

    def attach_views(self) -> None:
        """Make the parameters views of ``full``."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Make the parameters placeholders, until ``attach_views()``: the buffer is stored whole and written to."""
        if not self.placeholders:
            self.placeholders = [placeholder(spec.shape, self.dtype, self.full.device) for spec in self.layout.specs]
        for parameter, substitute in zip(self.parameters, self.placeholders, strict=True):
            parameter.data = substitute

    def release(self, *, keep_user_views: bool = False) -> None:
        """Replicate -> Shard: the parameters become placeholders, the storage is emptied. Communicates nothing.

        Args:
            keep_user_views: keep the storage alive for views that the user holds (``parameter.detach()``); the buffer
                allocates new memory at the next gather.
        """
        self.placement = self.stored
        for parameter, substitute in zip(self.parameters, self.placeholders, strict=True):
            parameter.data = substitute
        if keep_user_views and torch._C._storage_Use_Count(self._storage._cdata) > len(self.views) + 2:
            self._replace_full(torch.empty_like(self.full))
        self.free()
        self.is_full = False

    def keep_hpz_shard(self) -> None:
        """Keep this rank's range of the second sharding for the backward pass, while the buffer is full."""
        if self._hpz is None:
            return
        assert self._hpz_comm is not None
        if self._hpz.shard is None:
            numel = self.layout.numel // self._hpz_comm.size
            self._hpz.shard = self._hpz_comm.empty(numel, self.dtype, self.full.device)
        self._hpz_comm.drain()
        self._hpz.full, self._hpz.placement = self.full, Placement()
        self._hpz.redistribute(HPZ)

    # a shard on a disk

    def _is_read(self, *, from_hpz: bool) -> bool:
        return self._disk_buffer is not None and not (from_hpz and self.nbytes_hpz)

    def start_fetch(self, *, from_hpz: bool = False, used: Used | None = None) -> None:
        """Begin to read what ``gather`` with these arguments needs from the disk. Does not block the host."""
        if self._is_read(from_hpz=from_hpz):
            assert self._disk is not None and self._disk_buffer is not None
            self._disk.start_fetch(self._disk_buffer, self._owned_nbytes(used))

    def fetch(self, *, from_hpz: bool = False, used: Used | None = None) -> None:
        """Wait until it is read. Raises: TierError: it could not be."""
        if self._is_read(from_hpz=from_hpz):
            assert self._disk is not None and self._disk_buffer is not None
            self._disk.fetch(self._disk_buffer, self._owned_nbytes(used))

    def can_fetch_ahead(self) -> bool:
        """True if there is a free buffer to read the shard ahead of its use."""
        return self._disk is None or self._disk.can_fetch_ahead(self.nbytes_of_shard)

    def pin_shard(self, *, is_overwritten: bool = False, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Keep the shard in memory until ``unpin_shard()``. Nothing where it is not on a disk.

        Args:
            is_overwritten: the caller overwrites all of it, so it is not read, and zero.
            ranges: bytes of it that the caller reads; None: all.

        Raises: TierError: it could not be read.
        """
        if self._disk is None or self._disk_buffer is None:
            return
        if is_overwritten and not self._disk_buffer.pin_count:
            self._disk.zero(self._disk_buffer)
        else:
            self._disk.fetch(self._disk_buffer, ranges)
        self._disk_buffer.pin_count += 1
        self.shard = self._fetched()

    def unpin_shard(self, *, is_read_only: bool = False) -> None:
        """Store the shard on its disk, unless it was only read. Raises: TierError."""
        if self._disk is None or self._disk_buffer is None:
            return
        self._disk_buffer.pin_count -= 1
        self._is_changed |= not is_read_only
        if self._disk_buffer.pin_count:
            return
        self.shard = placeholder((self.end - self.begin,), self.dtype, torch.device("cpu"))
        is_changed, self._is_changed = self._is_changed, False
        if is_changed:
            self._disk.store(self._disk_buffer)
        else:
            self._disk.discard(self._disk_buffer)

    @contextmanager
    def resident_shard(
        self,
        *,
        is_overwritten: bool = False,
        is_read_only: bool = False,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> Iterator[None]:
        """Keep the shard in memory inside the block; changes are stored, unless ``is_read_only``."""
        self.pin_shard(is_overwritten=is_overwritten, ranges=ranges)
        try:
            yield
        finally:
            self.unpin_shard(is_read_only=is_read_only)

    def _fetched(self) -> torch.Tensor:
        assert self._disk_buffer is not None
        if self._disk_buffer.memory is None:  # this rank owns nothing
            return torch.empty(0, dtype=self.dtype)
        return self._disk_buffer.memory[: self.nbytes_of_shard].view(self.dtype)

    # other memory

    def move_to_host(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Store the parameters in host memory for a while. The buffer is sharded, no peer reads it.

        Gathering works from there. Parameters that are stored whole become views of that memory. Communicates nothing.

        Args:
            empty: allocates it.
        """
        if self._hpz is not None:
            self._hpz.shard = None  # made anew by the next forward pass
        if self.is_sharded:
            self.shard = empty(self.shard.numel(), self.dtype).copy_(self.shard, non_blocking=True)
            self.is_shard_offloaded = True
        else:
            self._move_full(empty(self.full.numel(), self.dtype))
        self.is_moved = True

    def move_to_device(self, device: torch.device) -> None:
        """Undo ``move_to_host``."""
        if self.is_sharded:
            shard = self.comm.empty(self.shard.numel(), self.dtype, device)
            self.shard = shard.copy_(self.shard, non_blocking=True)
            self.is_shard_offloaded = False
        else:
            self._move_full(self.comm.empty(self.full.numel(), self.dtype, device))
        self.is_moved = False

    def _move_full(self, full: torch.Tensor) -> None:
        self._replace_full(full.copy_(self.full, non_blocking=True))
        self.shard = full[self.begin : self.end]
        self.attach_views()

    def _replace_full(self, full: torch.Tensor) -> None:
        self.full = full
        self._storage = full.untyped_storage()
        self.views = self._views_of(full)

    def write_back(self) -> None:
        """Copy this rank's range of the full buffer into its shard, after the parameters were changed in place."""
        if self.is_sharded:
            self.comm.drain()
            with self.resident_shard(is_overwritten=True):
                self.shard.copy_(self.full[self.begin : self.end])

    def detach(self) -> None:
        """Give the parameters tensors of their own and free the buffer's memory (the buffer must be full)."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view.clone()
        nothing = self.full.new_empty(0)
        self.full, self.shard, self.views, self._hpz = nothing, nothing, [], None
        self._disk = self._disk_buffer = None
        self._storage = nothing.untyped_storage()
