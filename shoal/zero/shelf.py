"""Optimizer state on a disk: fetched for a unit's update, stored behind it, the next unit's on its way meanwhile.

    step     | unit 0     | unit 1     | unit 2     |
    reads    | 1 ...      | 2 ...      |            |
    updates  | 0          | 1          | 2          |
    writes   |            | 0 ...      | 1 ...      | 2 ...

Between its updates a bucket's master weights and optimizer state are stand-ins: they show their true size and read as
NaN. Whoever else needs them holds them ``at_hand``.

Source: ZeRO-Infinity (arXiv:2104.07857), sections 5.2.2 and 6.2: disk and update overlap, buffers are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shoal.memory.aligned import PAGE, aligned_empty, round_up
from shoal.memory.bucket import stand_in
from shoal.memory.disk import DiskTier
from shoal.memory.io_threads import Ticket
from shoal.memory.transfer import Extent

if TYPE_CHECKING:
    from shoal.zero.step import BucketState, ShardedStep

MASTER = "master"
_AHEAD = 1  # buckets whose state is read before their turn
_BEHIND = 2  # buckets whose state may still be on its way to the disk

Spec = tuple[str, torch.dtype]


@dataclass
class _Place:
    """Where one bucket's state is."""

    specs: tuple[Spec, ...] = ()  # what the extent holds, one after the other
    extent: Extent | None = None
    buffer: torch.Tensor | None = None  # [nbytes] uint8, while it is in memory or on its way
    reads: list[Ticket] = field(default_factory=list)
    is_here: bool = False
    num_holders: int = 0


class StateShelf:
    """The optimizer state of all buckets of one rank, on a disk.

    Memory: on the host at most three buckets' state: the one that is updated, the next, the last (and one more behind).
    """

    def __init__(self, tier: DiskTier, step: ShardedStep, states: Sequence[BucketState]) -> None:
        self.tier = tier
        self._step = step
        self._states = list(states)
        self._index = {id(state): index for index, state in enumerate(self._states)}
        self._places = {id(state): _Place() for state in self._states}
        self._writes: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._visited: BucketState | None = None
        self._held_nbytes = 0

    def store_all(self) -> None:
        """At the start: everything to the disk. Raises: OutOfMemoryError, TierError."""
        for state in self._states:
            place = self._places[id(state)]
            place.is_here = True
            self.put_away(state)
        self.drain()

    @property
    def host_nbytes(self) -> int:
        """Bytes of the buffers, in use or ready."""
        return self._held_nbytes

    # one bucket

    def start_fetch(self, state: BucketState) -> None:
        """Begin to read a bucket's state. Returns at once."""
        place = self._places[id(state)]
        if place.is_here or place.buffer is not None or place.extent is None:
            return
        place.buffer = self._take(place.extent.nbytes)
        place.reads = [self.tier.read(place.extent, place.buffer[: place.extent.nbytes])]

    def bring(self, state: BucketState, *, reads_ahead: bool = False) -> None:
        """Have a bucket's state in memory, and (in a step) begin to read the next one's.

        Raises: TierError: it could not be read.
        """
        place = self._places[id(state)]
        if not place.is_here:
            self.start_fetch(state)
            for ticket in place.reads:
                ticket.wait()
            place.reads = []
            self._attach(state, place)
            place.is_here = True
        if reads_ahead:
            following = self._index[id(state)] + 1
            for later in self._states[following : following + _AHEAD]:
                self.start_fetch(later)

    def put_away(self, state: BucketState) -> None:
        """Begin to store a bucket's state; what is left in memory are stand-ins.

        Raises: TierError: an earlier bucket's could not be stored.
        """
        place = self._places[id(state)]
        if not place.is_here or place.num_holders:
            return
        self._make_extent(state, place)
        if place.extent is not None and place.buffer is not None:
            self._detach(state, place)
            ticket = self.tier.write(place.extent, place.buffer[: place.extent.nbytes])
            self._writes.append((ticket, place.buffer))
            place.buffer = None
            place.is_here = False
        while len(self._writes) > _BEHIND:
            self._finish_write()

    def drain(self) -> None:
        """Wait until all is stored. Raises: TierError."""
        while self._writes:
            self._finish_write()

    @contextmanager
    def at_hand(self, state: BucketState) -> Iterator[None]:
        """Hold a bucket's state in memory; what changes in it is stored."""
        place = self._places[id(state)]
        self.bring(state)
        place.num_holders += 1
        try:
            yield
        finally:
            place.num_holders -= 1
            self.put_away(state)

    def visit(self, state: BucketState) -> None:
        """As ``at_hand``, until another bucket is visited or ``leave()`` is called."""
        if self._visited is not state:
            self.leave()
            self.bring(state)
            self._places[id(state)].num_holders += 1
            self._visited = state

    def leave(self) -> None:
        """Nobody visits any more."""
        if self._visited is not None:
            state, self._visited = self._visited, None
            self._places[id(state)].num_holders -= 1
            self.put_away(state)

    def close(self) -> None:
        """Remove the files. What was on the disk is gone."""
        self._visited = None
        self._writes.clear()
        self._free.clear()
        self.tier.close()

    # memory

    def _take(self, nbytes: int) -> torch.Tensor:
        size = round_up(nbytes, PAGE)
        free = self._free.setdefault(size, [])
        if not free:
            for index, (ticket, buffer) in enumerate(self._writes):
                if buffer.numel() == size and ticket.is_done:
                    ticket.wait()
                    del self._writes[index]
                    return buffer
        if free:
            return free.pop()
        self._held_nbytes += size
        return aligned_empty(size)

    def _finish_write(self) -> None:
        ticket, buffer = self._writes.popleft()
        ticket.wait()
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def _specs_of(self, state: BucketState) -> tuple[Spec, ...]:
        specs: dict[str, torch.dtype] = {MASTER: state.master.dtype} if state.has_own_master else {}
        for piece in state.pieces:
            for key, value in self._step.optimizer.state.get(piece.param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == piece.param.numel():
                    specs.setdefault(key, value.dtype)
        return tuple(specs.items())

    def _views(self, state: BucketState, specs: Sequence[Spec], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        numel = state.bucket.end - state.bucket.begin
        views, at = {}, 0
        for key, dtype in specs:
            views[key] = buffer[at : at + numel * dtype.itemsize].view(dtype)
            at += round_up(numel * dtype.itemsize, PAGE)
        return views

    def _make_extent(self, state: BucketState, place: _Place) -> None:
        """Room for what the bucket has now: the first step makes optimizer state, a load may change it."""
        specs = self._specs_of(state)
        if specs == place.specs and place.buffer is not None:
            return
        numel = state.bucket.end - state.bucket.begin
        nbytes = sum(round_up(numel * dtype.itemsize, PAGE) for _, dtype in specs)
        if not nbytes:
            return
        if place.extent is not None and place.specs != specs:
            self.tier.free(place.extent)
            place.extent = None
        if place.extent is None:
            place.extent = self.tier.allocate(f"{state.bucket.label} {len(specs)}", nbytes)
        old, place.buffer = place.buffer, self._take(nbytes)
        place.buffer.zero_()
        place.specs = specs
        if old is not None:
            self._copy_into(state, place)
            self._free.setdefault(old.numel(), []).append(old)

    # values

    def _copy_into(self, state: BucketState, place: _Place) -> None:
        assert place.buffer is not None
        views = self._views(state, place.specs, place.buffer)
        if MASTER in views and views[MASTER].data_ptr() != state.master.data_ptr():
            views[MASTER].copy_(state.master)
        for piece in state.pieces:
            for key, value in self._step.optimizer.state.get(piece.param, {}).items():
                if key in views and isinstance(value, torch.Tensor) and value.dim() == 1:
                    target = views[key][piece.start : piece.stop]
                    if target.data_ptr() != value.data_ptr():
                        target.copy_(value)

    def _attach(self, state: BucketState, place: _Place) -> None:
        if place.buffer is None:
            return
        self._point(state, self._views(state, place.specs, place.buffer))

    def _detach(self, state: BucketState, place: _Place) -> None:
        self._copy_into(state, place)
        numel = state.bucket.end - state.bucket.begin
        self._point(state, {key: stand_in((numel,), dtype, torch.device("cpu")) for key, dtype in place.specs})

    def _point(self, state: BucketState, flats: dict[str, torch.Tensor]) -> None:
        if MASTER in flats:
            state.master = flats[MASTER]
        for piece in state.pieces:
            if MASTER in flats:
                piece.param.data = state.master[piece.start : piece.stop]
            held = self._step.optimizer.state.get(piece.param, {})
            for key in held:
                if key in flats and isinstance(held[key], torch.Tensor) and held[key].dim() == 1:
                    held[key] = flats[key][piece.start : piece.stop]
