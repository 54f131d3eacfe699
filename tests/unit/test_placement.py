"""Which collective leads from one placement to another, and which moves do not exist."""

from __future__ import annotations

import pytest

from shoal.errors import PlacementError
from shoal.memory.placement import PARTIAL, REPLICATE, SHARD, Kind, Placement, collective


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Kind.SHARD, Kind.REPLICATE, "all_gather"),
        (Kind.PARTIAL, Kind.SHARD, "reduce_scatter"),
        (Kind.PARTIAL, Kind.REPLICATE, "all_reduce"),
        (Kind.REPLICATE, Kind.SHARD, "drop"),
        (Kind.SHARD, Kind.SHARD, "nothing"),
        (Kind.PARTIAL, Kind.PARTIAL, "nothing"),
    ],
)
def test_one_collective_leads_from_one_placement_to_another(source: Kind, target: Kind, expected: str) -> None:
    assert collective(source, target) == expected


@pytest.mark.parametrize("source", [Kind.REPLICATE, Kind.SHARD])
def test_nothing_leads_to_partial(source: Kind) -> None:
    with pytest.raises(PlacementError, match=f"from {source.value} to Partial") as caught:
        collective(source, Kind.PARTIAL)
    assert caught.value.code == "placement-no-move"
    assert "Partial -> Shard" in caught.value.do


def test_a_placement_is_written_with_its_outer_axis_only_where_that_matters() -> None:
    assert [str(placement) for placement in (REPLICATE, SHARD, PARTIAL, Placement(Kind.SHARD, Kind.PARTIAL))] == [
        "Replicate",
        "Shard",
        "Partial",
        "Shard x Partial",
    ]
