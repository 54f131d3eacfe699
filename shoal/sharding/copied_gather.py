"""Gathers whose source is copied first: an offloaded shard to the device, or ranges of a shard next to each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.comm.protocol import Communicator, FinishedWork, Work
from shoal.comm.side_stream import CopyDone
from shoal.memory.host import round_up
from shoal.memory.stream_copies import StreamCopies
from shoal.memory.transfer import clipped
from shoal.sharding.layout import ALIGNMENT, Ranges
from shoal.sharding.placement import Tier
from shoal.sharding.storage import AllGather, ShardStorage
from shoal.streams import keep_for_current_stream


class OffloadedStorage(ShardStorage):
    """A shard that is copied to the device before a use.

    Args:
        copies: copies it, concurrently to the device's work; None: the current stream does.
    """

    def __init__(self, values: torch.Tensor, copies: StreamCopies | None = None) -> None:
        super().__init__(values)
        self.copies = copies
        self._staged: torch.Tensor | None = None  # on the device, for the next gather

    def allocate(self, full: torch.Tensor, comm: Communicator) -> None:
        if comm.size > 1:
            self._staged = comm.empty(self.values.numel(), full.dtype, full.device)

    def free(self) -> None:
        self._staged = None

    def gather(self, full: torch.Tensor, comm: Communicator, all_gather: AllGather) -> Work:
        """Copy the shard to the device and gather it. The current stream waits for neither before ``Work.wait()``."""
        if self._staged is None:
            self.allocate(full, comm)
        # A tensor of its own: peers may read it after the full buffer was released.
        staged, self._staged = self._staged, None
        # The all-gather is issued where the copy is queued: it starts after the copy, not after the device's work.
        with _queued(self) as copied:
            with self.resident(is_read_only=True):
                (full if staged is None else staged).copy_(self.values, non_blocking=True)
            work = all_gather(full, staged)
        return _GatherAfterCopy(work, copied, full, staged)


class HostStorage(OffloadedStorage):
    """A shard in host memory."""

    tier = Tier.HOST


def gather_ranges(
    storage: ShardStorage, full: torch.Tensor, comm: Communicator, ranges: Ranges, all_gather: AllGather
) -> Work:
    """Gather ranges of a buffer only; others are NaN. The current stream waits for nothing before ``Work.wait()``.

    Communicates: one all-gather of the rank's largest part of the ranges.
    """
    shard_numel, size = full.numel() // comm.size, full.itemsize
    owned = [clipped(ranges, rank * shard_numel, (rank + 1) * shard_numel) for rank in range(comm.size)]
    mine = [(start - comm.rank * shard_numel, stop - comm.rank * shard_numel) for start, stop in owned[comm.rank]]
    numel = round_up(max(sum(stop - start for start, stop in each) for each in owned), ALIGNMENT)
    full.fill_(float("nan"))
    staged = gathered = full
    if comm.size > 1:
        staged = comm.empty(numel, full.dtype, full.device)
        gathered = comm.empty(numel * comm.size, full.dtype, full.device)
    work: Work = FinishedWork(full)
    with _queued(storage) as copied:
        with storage.resident(is_read_only=True, ranges=[(start * size, stop * size) for start, stop in mine]):
            at = 0
            for start, stop in mine:
                at = at if comm.size > 1 else start
                staged[at : at + stop - start].copy_(storage.values[start:stop], non_blocking=True)
                at += stop - start
        if comm.size > 1:
            work = all_gather(gathered, staged)

    def place() -> None:
        for part, ranges_of_rank in zip(gathered.chunk(comm.size), owned, strict=True):
            at = 0
            for start, stop in ranges_of_rank:
                full[start:stop].copy_(part[at : at + stop - start])
                at += stop - start

    return _GatherAfterCopy(work, copied, full, staged, place if comm.size > 1 else None)


def _queued(storage: ShardStorage) -> AbstractContextManager[CopyDone]:
    return nullcontext(CopyDone()) if storage.copies is None else storage.copies.queued()


class _GatherAfterCopy:
    """An all-gather whose source is copied first, both concurrently to the current stream.

    Args:
        full: the result.
        source: where the shard is copied to; the copy stream may have allocated it.
        place: puts what was gathered in its place in ``full``; None: it is there.
    """

    def __init__(
        self,
        work: Work,
        copied: CopyDone,
        full: torch.Tensor,
        source: torch.Tensor | None,
        place: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._copied = copied
        self._full = full
        self._source = source
        self._place = place

    def wait(self) -> torch.Tensor:
        self._copied.wait()
        self._work.wait()
        source, place, self._source, self._place = self._source, self._place, None, None
        if source is not None:
            keep_for_current_stream(source)
        if place is not None:
            place()
        return self._full

    def drain(self) -> None:
        self.wait()
        self._work.drain()
