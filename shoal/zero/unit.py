"""A unit: parameters that are needed together, and the small state machine of their memory.

| state     | memory held                                   | for a shard on a disk                 |
| --------- | --------------------------------------------- | ------------------------------------- |
| AWAY      |                                               | nothing                               |
| FETCHING  |                                               | a buffer on the host, not filled yet  |
| RESTING   | the shard, on its tier                        | that buffer, filled                   |
| GATHERING | the shard and the full bucket, not filled yet | the full bucket, not filled yet       |
| FULL      | the shard and the full bucket                 | the full bucket                       |

A unit whose parameters rest as Replicate is FULL for ever. ``gather`` and ``release`` may be called by a hook, by a
pipeline schedule or by the user (``GatheredParameters``): holds are counted, and the last release counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from shoal.comm.protocol import Work
from shoal.errors import PlacementError
from shoal.memory.bucket import ParameterBucket
from shoal.memory.placement import Kind
from shoal.zero.table import Row


class UnitState(Enum):
    AWAY = "AWAY"
    FETCHING = "FETCHING"
    RESTING = "RESTING"
    GATHERING = "GATHERING"
    FULL = "FULL"


_MOVES: dict[UnitState, frozenset[UnitState]] = {
    UnitState.AWAY: frozenset({UnitState.FETCHING}),
    UnitState.FETCHING: frozenset({UnitState.RESTING}),
    UnitState.RESTING: frozenset({UnitState.GATHERING, UnitState.AWAY}),
    UnitState.GATHERING: frozenset({UnitState.FULL}),
    UnitState.FULL: frozenset({UnitState.RESTING}),
}


class Unit:
    """The parameters of one row of the table.

    Args:
        buckets: one per dtype and trainability.
        row: where its state rests.
    """

    def __init__(self, name: str, index: int, row: Row, buckets: Sequence[ParameterBucket]) -> None:
        self.name = name
        self.index = index
        self.row = row
        self.buckets = list(buckets)
        self.is_sharded = any(bucket.is_sharded for bucket in self.buckets)
        self.is_on_disk = any(bucket.is_on_disk for bucket in self.buckets)
        self.numel = sum(bucket.layout.numel for bucket in self.buckets)
        self.state = UnitState.FULL
        self.holds = 0  # callers beside the hooks that need it full
        self.externals: list[Unit] = []  # units whose parameters this unit's forward reads
        self.before_gather: Callable[[], None] | None = None  # has the shards as the last step leaves them
        self._works: list[Work] = []

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value})"

    def _move(self, to: UnitState) -> None:
        if to not in _MOVES[self.state]:
            raise PlacementError(
                f"unit {self.name!r} cannot go from {self.state.value} to {to.value}.",
                do=f"from {self.state.value} the moves are: {', '.join(sorted(s.value for s in _MOVES[self.state]))}.",
                code="unit-move",
            )
        self.state = to

    @property
    def is_at_rest(self) -> bool:
        """Neither gathered nor being gathered."""
        return self.state in (UnitState.RESTING, UnitState.AWAY, UnitState.FETCHING)

    def start_fetch(self, *, from_secondary: bool = False) -> None:
        """Begin to read the shard from its disk. Nothing where it rests elsewhere. Does not block the host."""
        if self.state is not UnitState.AWAY:
            return
        self._move(UnitState.FETCHING)
        for bucket in self.buckets:
            bucket.start_fetch(from_secondary=from_secondary)

    def can_fetch_ahead(self) -> bool:
        """Is there room to read the shard ahead of its use?"""
        return all(bucket.can_fetch_ahead() for bucket in self.buckets)

    def start_gather(self, *, from_secondary: bool = False) -> None:
        """Begin to gather. Nothing when it is gathered or on the way.

        Raises: TierError: the shard could not be read from its disk.
        Communicates: per sharded bucket one all_gather, (N - 1) / N of the bucket received per rank.
        Order: blocks the host only until a shard on a disk has been read.
        """
        if not self.is_at_rest:
            return
        if self.before_gather is not None:
            self.before_gather()
        if self.state is not UnitState.RESTING:
            self.start_fetch(from_secondary=from_secondary)
            for bucket in self.buckets:
                bucket.fetch(from_secondary=from_secondary)
            self._move(UnitState.RESTING)
        self._move(UnitState.GATHERING)
        self._works = [b.gather(from_secondary=from_secondary) for b in self.buckets if b.is_sharded]

    def gather(self, *, from_secondary: bool = False) -> None:
        """Make the parameters whole and usable."""
        if self.state is UnitState.FULL:
            return
        self.start_gather(from_secondary=from_secondary)
        for work in self._works:
            work.wait()
        self._works = []
        for bucket in self.buckets:
            if bucket.is_sharded:
                bucket.adopt()
        self._move(UnitState.FULL)

    def release(self, *, keeps_others: bool = False) -> None:
        """Let the full bucket go, unless somebody holds the unit. Communicates nothing.

        Args:
            keeps_others: tensors that somebody has made of its memory keep it.
        """
        if not self.is_sharded or self.holds or self.is_at_rest:
            return
        if self.state is UnitState.GATHERING:
            self.gather()
        for bucket in self.buckets:
            if bucket.is_sharded:
                bucket.release(keeps_others=keeps_others)
        self._move(UnitState.RESTING)
        if self.is_on_disk:
            self._move(UnitState.AWAY)

    def settle_at_rest(self) -> None:
        """Called once, when the shards have been filled from the full buckets."""
        if self.row.parameter.inner is Kind.SHARD:
            self.release()
