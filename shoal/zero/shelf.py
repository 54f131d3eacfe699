"""Optimizer state on a disk: fetched for a unit's update, stored behind it, the next unit's on its way meanwhile.

    step     | unit 0     | unit 1     | unit 2     |
    reads    | 1 ...      | 2 ...      |            |
    updates  | 0          | 1          | 2          |
    writes   |            | 0 ...      | 1 ...      | 2 ...

Between its updates a bucket's master weights and optimizer state are stand-ins: they show their true size and read as
NaN. Whoever else needs them holds them ``at_hand``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.memory.aligned import PAGE, round_up
from shoal.memory.bucket import ParameterBucket, stand_in
from shoal.memory.shelf import Place, Shelf

if TYPE_CHECKING:
    from shoal.zero.bucket_state import BucketState
    from shoal.zero.step import ShardedStep

MASTER = "master"
_AHEAD = 1  # buckets whose state is read before their turn

Spec = tuple[str, torch.dtype]


@dataclass(eq=False)
class _Held:
    """What rests of one bucket, one after the other in one place."""

    place: Place
    specs: tuple[Spec, ...] = ()


class StateShelf:
    """The optimizer state of one rank's buckets, on a disk.

    Master weights come as their bucket is built (``admit``), so that memory never holds all of them; the optimizer
    comes with ``bind``, and its state bucket by bucket in the first step.

    Memory: on the host at most three buckets' state: the one that is updated, the next, the last (and one more behind).
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._step: ShardedStep | None = None
        self._states: list[BucketState] = []
        self._index: dict[int, int] = {}
        self._held: dict[int, _Held] = {}  # by id of the bucket
        self._visited: BucketState | None = None

    @torch.no_grad()
    def admit(self, bucket: ParameterBucket, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Begin to store a bucket's master weights. Returns: their stand-in. Raises: OutOfMemoryError, TierError."""
        held = _Held(self._shelf.make(bucket.label, _nbytes(source.numel(), ((MASTER, dtype),))), ((MASTER, dtype),))
        assert held.place.buffer is not None
        _views(source.numel(), held.specs, held.place.buffer)[MASTER].copy_(source)
        self._shelf.put_away(held.place)
        self._held[id(bucket)] = held
        return stand_in((source.numel(),), dtype, torch.device("cpu"))

    def bind(self, step: ShardedStep, states: Sequence[BucketState]) -> None:
        """From now on these buckets' state rests here, in this order of use."""
        self._step = step
        self._states = list(states)
        self._index = {id(state): index for index, state in enumerate(self._states)}
        for state in self._states:
            self._held.setdefault(id(state.bucket), _Held(Place(state.bucket.label, is_here=True)))
            state.shelf = self
        self._shelf.drain()

    @property
    def host_nbytes(self) -> int:
        """Bytes of the buffers, in use or kept."""
        return self._shelf.host_nbytes

    def _held_of(self, state: BucketState) -> _Held:
        return self._held[id(state.bucket)]

    # one bucket

    def start_fetch(self, state: BucketState) -> None:
        """Begin to read a bucket's state. Returns at once."""
        self._shelf.start_fetch(self._held_of(state).place)

    def bring(self, state: BucketState, *, reads_ahead: bool = False) -> None:
        """Have a bucket's state in memory, and (in a step) begin to read the next one's.

        Raises: TierError: it could not be read.
        """
        held = self._held_of(state)
        if self._shelf.bring(held.place) and held.place.buffer is not None:
            self._point(state, _views(_numel(state), held.specs, held.place.buffer))
        if reads_ahead:
            following = self._index[id(state)] + 1
            for later in self._states[following : following + _AHEAD]:
                self.start_fetch(later)

    def put_away(self, state: BucketState) -> None:
        """Begin to store a bucket's state; what is left in memory are stand-ins.

        Raises: TierError: an earlier bucket's could not be stored.
        """
        held = self._held_of(state)
        if not held.place.is_here or held.place.num_holders:
            return
        old = self._fit(state, held)
        if held.place.extent is not None and held.place.buffer is not None:
            self._copy_into(state, held)
            cpu = torch.device("cpu")
            self._point(state, {key: stand_in((_numel(state),), dtype, cpu) for key, dtype in held.specs})
        if old is not None:
            self._shelf.give_back(old)
        self._shelf.put_away(held.place)

    def drain(self) -> None:
        """Wait until all is stored. Raises: TierError."""
        self._shelf.drain()

    @contextmanager
    def at_hand(self, state: BucketState) -> Iterator[None]:
        """Hold a bucket's state in memory; what changes in it is stored."""
        place = self._held_of(state).place
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
            self._held_of(state).place.num_holders += 1
            self._visited = state

    def leave(self) -> None:
        """Nobody visits any more."""
        if self._visited is not None:
            state, self._visited = self._visited, None
            self._held_of(state).place.num_holders -= 1
            self.put_away(state)

    def close(self) -> None:
        """Remove the files. What was on the disk is gone."""
        self._visited = self._step = None
        self._states.clear()
        self._held.clear()
        self._shelf.close()

    # values

    def _specs_of(self, state: BucketState) -> tuple[Spec, ...]:
        assert self._step is not None
        specs: dict[str, torch.dtype] = {MASTER: state.master.dtype} if state.has_own_master else {}
        for piece in state.pieces:
            for key, value in self._step.optimizer.state.get(piece.param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == piece.param.numel():
                    specs.setdefault(key, value.dtype)
        return tuple(specs.items())

    def _fit(self, state: BucketState, held: _Held) -> torch.Tensor | None:
        """Room for what the bucket has now: the first step makes optimizer state, a load may change it.

        Returns: the buffer in which its values still lie, where that is another one now.
        """
        specs = self._specs_of(state)
        nbytes = _nbytes(_numel(state), specs)
        if not nbytes or (specs == held.specs and held.place.buffer is not None):
            return None
        held.specs = specs
        return self._shelf.resize(held.place, nbytes)

    def _copy_into(self, state: BucketState, held: _Held) -> None:
        assert held.place.buffer is not None and self._step is not None
        views = _views(_numel(state), held.specs, held.place.buffer)
        if MASTER in views and views[MASTER].data_ptr() != state.master.data_ptr():
            views[MASTER].copy_(state.master)
        for piece in state.pieces:
            for key, value in self._step.optimizer.state.get(piece.param, {}).items():
                if key in views and isinstance(value, torch.Tensor) and value.dim() == 1:
                    target = views[key][piece.start : piece.stop]
                    if target.data_ptr() != value.data_ptr():
                        target.copy_(value)

    def _point(self, state: BucketState, flats: dict[str, torch.Tensor]) -> None:
        assert self._step is not None
        if MASTER in flats:
            state.master = flats[MASTER]
        for piece in state.pieces:
            if MASTER in flats:
                piece.param.data = state.master[piece.start : piece.stop]
            held = self._step.optimizer.state.get(piece.param, {})
            for key in held:
                if key in flats and isinstance(held[key], torch.Tensor) and held[key].dim() == 1:
                    held[key] = flats[key][piece.start : piece.stop]


@dataclass
class Disks:
    """What of one rank rests on disks."""

    parameters: Shelf | None = None
    state: StateShelf | None = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of the buffers, in use or kept."""
        return sum(shelf.host_nbytes for shelf in (self.parameters, self.state) if shelf is not None)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        for shelf in (self.parameters, self.state):
            if shelf is not None:
                shelf.close()


def _numel(state: BucketState) -> int:
    return state.bucket.end - state.bucket.begin


def _nbytes(numel: int, specs: Sequence[Spec]) -> int:
    return sum(round_up(numel * dtype.itemsize, PAGE) for _, dtype in specs)


def _views(numel: int, specs: Sequence[Spec], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for key, dtype in specs:
        views[key] = buffer[at : at + numel * dtype.itemsize].view(dtype)
        at += round_up(numel * dtype.itemsize, PAGE)
    return views
