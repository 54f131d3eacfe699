"""Which collectives lead from one placement to another, and which moves do not exist."""

from __future__ import annotations

import pytest

from shoal.errors import PlacementError
from shoal.sharding.placement import PARTIAL, REPLICATE, SHARD, Placement, Spread, Tier, moves


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (SHARD, REPLICATE, ["all_gather"]),
        (PARTIAL, SHARD, ["reduce_scatter"]),
        (PARTIAL, REPLICATE, ["all_reduce"]),
        (REPLICATE, SHARD, ["drop"]),
        (SHARD, SHARD, []),
        (PARTIAL, PARTIAL, []),
    ],
)
def test_one_collective_leads_from_one_placement_to_another(
    source: Spread, target: Spread, expected: list[str]
) -> None:
    found = moves(Placement.of(tp=source), Placement.of(tp=target))
    assert [move.collective for move in found] == expected
    assert all((move.axis, move.source, move.target) == ("tp", source, target) for move in found)


@pytest.mark.parametrize("source", [REPLICATE, SHARD])
def test_nothing_leads_to_partial(source: Spread) -> None:
    with pytest.raises(PlacementError, match=f"from {source.value} to Partial on axis 'tied'") as caught:
        moves(Placement.of(tied=source), Placement.of(tied=PARTIAL))
    assert caught.value.code == "placement-no-move"
    assert "Partial -> Shard" in caught.value.do


def test_of_several_axes_the_one_that_shards_comes_first_and_the_gather_last() -> None:
    source = Placement.of(dp_replicate=PARTIAL, dp_shard=PARTIAL, tp=SHARD, pp=SHARD)
    found = moves(source, Placement.of(dp_shard=SHARD, pp=SHARD))
    assert [(move.axis, move.collective) for move in found] == [
        ("dp_shard", "reduce_scatter"),
        ("dp_replicate", "all_reduce"),
        ("tp", "all_gather"),
    ]


def test_a_placement_names_the_axes_where_they_differ() -> None:
    placements = [
        Placement(),
        Placement.of(dp_shard=SHARD),
        Placement.of(dp_shard=PARTIAL, dp_replicate=PARTIAL),
        Placement.of(dp_shard=SHARD, dp_replicate=PARTIAL),
    ]
    assert [str(each) for each in placements] == [
        "Replicate",
        "Shard",
        "Partial",
        "dp_shard: Shard, dp_replicate: Partial",
    ]


def test_a_placement_is_equal_to_another_of_the_same_axes_and_tier() -> None:
    assert Placement.of(tp=REPLICATE, dp_shard=SHARD) == Placement.of(dp_shard=SHARD)
    assert Placement.of(dp_shard=SHARD).on(Tier.HOST) != Placement.of(dp_shard=SHARD)
    assert Placement.of(Tier.HOST, dp_shard=SHARD).over("dp_shard") is SHARD
    assert Placement.of(dp_shard=SHARD).over("tp") is REPLICATE
