"""How a flat buffer is spread over the data-parallel axes, and the one collective that leads from one way to another.

    REPLICATE   every rank holds the whole buffer, and all hold the same
    SHARD       rank r holds range r, and nobody else does
    PARTIAL     every rank holds the whole buffer, and the value is the sum over the ranks

| from      | to        | collective     | received per rank, of n bytes |
| --------- | --------- | -------------- | ----------------------------- |
| SHARD     | REPLICATE | all_gather     | (N - 1) / N n                 |
| PARTIAL   | SHARD     | reduce_scatter | (N - 1) / N n                 |
| PARTIAL   | REPLICATE | all_reduce     | 2 (N - 1) / N n               |
| REPLICATE | SHARD     | (drop)         | 0                             |

>>> collective(Kind.SHARD, Kind.REPLICATE)
'all_gather'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal.errors import PlacementError


class Kind(Enum):
    REPLICATE = "Replicate"
    SHARD = "Shard"
    PARTIAL = "Partial"


class Tier(Enum):
    """Where the bytes rest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


_COLLECTIVES: dict[tuple[Kind, Kind], str] = {
    (Kind.SHARD, Kind.REPLICATE): "all_gather",
    (Kind.PARTIAL, Kind.SHARD): "reduce_scatter",
    (Kind.PARTIAL, Kind.REPLICATE): "all_reduce",
    (Kind.REPLICATE, Kind.SHARD): "drop",
}


def collective(source: Kind, target: Kind) -> str:
    """The collective that moves a buffer from one placement to another.

    Raises: PlacementError: no single collective does.
    """
    if source is target:
        return "nothing"
    try:
        return _COLLECTIVES[source, target]
    except KeyError:
        raise PlacementError(
            f"no single collective leads from {source.value} to {target.value}.",
            do="go through a placement that both know: "
            + ", ".join(f"{a.value} -> {b.value}" for a, b in _COLLECTIVES),
            code="placement-no-move",
        ) from None


@dataclass(frozen=True)
class Placement:
    """A placement on the axis that shards (``inner``) and on the axis that replicates the shards (``outer``).

    Pure data parallel training has one axis only: there ``outer`` is Replicate over one rank.
    """

    inner: Kind
    outer: Kind = Kind.REPLICATE

    def __str__(self) -> str:
        return self.inner.value if self.outer is Kind.REPLICATE else f"{self.inner.value} x {self.outer.value}"


REPLICATE = Placement(Kind.REPLICATE)
SHARD = Placement(Kind.SHARD)
PARTIAL = Placement(Kind.PARTIAL)
