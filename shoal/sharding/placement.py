"""Where a flat buffer is stored: how it is spread over each mesh axis, and on which tier. The one table of moves.

    REPLICATE   every rank along the axis holds the same values
    SHARD       rank r along the axis holds range r, and no other rank holds it
    PARTIAL     every rank along the axis holds a summand; the value is the sum over the axis

| from      | to        | collective     | bytes received per rank, of n |
| --------- | --------- | -------------- | ----------------------------- |
| PARTIAL   | SHARD     | reduce_scatter | (N - 1) / N n                 |
| PARTIAL   | REPLICATE | all_reduce     | 2 (N - 1) / N n               |
| SHARD     | REPLICATE | all_gather     | (N - 1) / N n                 |
| REPLICATE | SHARD     | drop           | 0                             |

A placement names the axes that are not replicated; the moves between two placements are looked up axis by axis:

>>> source = Placement.of(dp_shard=PARTIAL, dp_replicate=PARTIAL)
>>> [(move.axis, move.collective) for move in moves(source, Placement.of(dp_shard=SHARD))]
[('dp_shard', 'reduce_scatter'), ('dp_replicate', 'all_reduce')]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property

from shoal.errors import PlacementError


class Spread(Enum):
    """How a buffer is spread over one axis: PyTorch's placement types."""

    REPLICATE = "Replicate"
    SHARD = "Shard"
    PARTIAL = "Partial"

    __hash__ = object.__hash__  # in C: placements are looked up in each collective


REPLICATE, SHARD, PARTIAL = Spread.REPLICATE, Spread.SHARD, Spread.PARTIAL


class Tier(Enum):
    """Where the bytes are stored."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


# In the order in which moves over several axes are issued: what makes the buffer smaller comes first, so that the
# later collectives carry fewer bytes.
_COLLECTIVES: dict[tuple[Spread, Spread], str] = {
    (PARTIAL, SHARD): "reduce_scatter",
    (REPLICATE, SHARD): "drop",
    (PARTIAL, REPLICATE): "all_reduce",
    (SHARD, REPLICATE): "all_gather",
}
_ORDER = tuple(_COLLECTIVES.values())


@dataclass(frozen=True)
class Placement:
    """How a buffer is spread over the mesh, and its tier.

    Args:
        axes: the axes that the buffer is not replicated over, sorted by name. Build it with ``of``.
    """

    axes: tuple[tuple[str, Spread], ...] = ()
    tier: Tier = Tier.DEVICE

    @classmethod
    def of(cls, tier: Tier = Tier.DEVICE, /, **axes: Spread) -> Placement:
        """A placement from axis names: ``Placement.of(dp_shard=SHARD, dp_replicate=PARTIAL)``."""
        return cls(tuple(sorted((axis, spread) for axis, spread in axes.items() if spread is not REPLICATE)), tier)

    def over(self, axis: str) -> Spread:
        """How the buffer is spread over ``axis``."""
        return dict(self.axes).get(axis, REPLICATE)

    def on(self, tier: Tier) -> Placement:
        """The same spread on another tier."""
        return replace(self, tier=tier)

    @cached_property
    def is_sharded(self) -> bool:
        """True if each rank along some axis holds only a range."""
        return any(spread is SHARD for _, spread in self.axes)

    def __str__(self) -> str:
        if not self.axes:
            return REPLICATE.value
        if len(self.axes) == 1 or len({spread for _, spread in self.axes}) == 1:
            return self.axes[0][1].value
        return ", ".join(f"{axis}: {spread.value}" for axis, spread in reversed(self.axes))


@dataclass(frozen=True)
class Move:
    """One collective along one axis."""

    axis: str
    source: Spread
    target: Spread
    collective: str


@cache
def moves(source: Placement, target: Placement) -> tuple[Move, ...]:
    """The collectives that lead from one placement to another, in the order in which they are issued.

    Raises: PlacementError: on some axis no single collective does.
    """
    result = []
    for axis in dict.fromkeys(axis for axis, _ in (*source.axes, *target.axes)):
        here, there = source.over(axis), target.over(axis)
        if here is there:
            continue
        if (here, there) not in _COLLECTIVES:
            raise PlacementError(
                f"no single collective leads from {here.value} to {there.value} on axis {axis!r}"
                f" ({source} -> {target}).",
                do="go through a placement that both reach: "
                + ", ".join(f"{a.value} -> {b.value}" for a, b in _COLLECTIVES),
                code="placement-no-move",
            )
        result.append(Move(axis, here, there, _COLLECTIVES[here, there]))
    return tuple(sorted(result, key=lambda move: _ORDER.index(move.collective)))
