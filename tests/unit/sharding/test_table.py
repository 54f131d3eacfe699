"""ZeRO is a table: what each stage fills in, and how it prints."""

from __future__ import annotations

import pytest

from shoal.errors import PlacementError
from shoal.observe.placement_table import Table, cells_of
from shoal.sharding.placement import PARTIAL, SHARD, Placement, Tier
from shoal.sharding.table import Row, row_of_stage


@pytest.mark.parametrize(
    ("stage", "cells"),
    [
        (0, ["u", "Replicate", "Partial", "Replicate", "Replicate", "nothing", "device"]),
        (1, ["u", "Replicate", "Partial", "Shard", "Shard", "all_gather", "device"]),
        (2, ["u", "Replicate", "Shard", "Shard", "Shard", "all_gather", "device"]),
        (3, ["u", "Shard", "Shard", "Shard", "Shard", "nothing", "device"]),
    ],
)
def test_a_stage_is_a_row(stage: int, cells: list[str]) -> None:
    assert cells_of(row_of_stage(stage, "u")) == cells


def test_hybrid_sharding_leaves_the_sum_over_replicas_to_the_step() -> None:
    hybrid = {stage: row_of_stage(stage, "u", replicate=["dp_replicate"]) for stage in (1, 2, 3)}
    assert str(hybrid[3].gradient_between) == "dp_shard: Shard, dp_replicate: Partial"
    assert str(hybrid[2].gradient_between) == "dp_shard: Shard, dp_replicate: Partial"
    assert str(hybrid[1].gradient_between) == "Partial"
    assert [str(row.gradient_at_step) for row in hybrid.values()] == ["Shard"] * 3


def test_a_further_axis_is_a_name_and_needs_no_code() -> None:
    norm = row_of_stage(3, "norm", replicate=["tp"])
    assert str(norm.gradient_between) == "tp: Partial, dp_shard: Shard"
    expert = row_of_stage(2, "experts", shard="expert_dp", replicate=["dp_replicate"])
    assert expert.gradient_at_step == Placement.of(expert_dp=SHARD)


def test_a_persistent_unit_at_stage_3_is_stored_as_at_stage_2() -> None:
    assert row_of_stage(3, "u", is_persistent=True) == row_of_stage(2, "u")
    assert row_of_stage(1, "u", is_persistent=True) == row_of_stage(1, "u")


def test_a_second_sharding_is_said_beside_the_first() -> None:
    assert cells_of(row_of_stage(3, "u", has_second=True))[1] == "Shard + hpZ"
    assert not row_of_stage(2, "u", has_second=True).has_second


def test_a_row_that_no_collective_can_execute_is_refused() -> None:
    whole, shard, partial = Placement(), Placement.of(dp_shard=SHARD), Placement.of(dp_shard=PARTIAL)
    with pytest.raises(PlacementError, match="from Replicate to Partial"):
        Row("u", whole, partial, whole, partial, shard)
    with pytest.raises(PlacementError, match="from Shard to Partial"):
        Row("u", whole, partial, shard, partial, shard)


def test_the_tier_is_a_column() -> None:
    row = row_of_stage(3, "u").on(Tier.DISK, Tier.HOST)
    assert cells_of(row)[-1] == "disk/device/host"
    assert cells_of(row_of_stage(3, "u").on(Tier.HOST, Tier.HOST, is_gradient_offloaded=True))[-1] == "host"
    assert (
        cells_of(row_of_stage(1, "u").on(Tier.DISK, Tier.HOST, is_gradient_offloaded=True))[-1] == "device/device/host"
    )


def test_equal_rows_of_consecutive_units_print_as_one_line() -> None:
    table = Table((row_of_stage(2, "root"), *(row_of_stage(3, f"layers.{index}") for index in range(12))))
    lines = str(table).splitlines()
    assert len(lines) == 4  # headers, a rule, two kinds of rows
    assert lines[2].split()[:2] == ["root", "Replicate"]
    assert lines[3].startswith("layers.0 .. layers.11 (12)")
    assert table.as_dict()[0] == {
        "unit": "root",
        "parameter, stored": "Replicate",
        "gradient between micro-batches": "Shard",
        "gradient at the step": "Shard",
        "main parameters + optimizer state": "Shard",
        "after the step": "all_gather",
        "tier": "device",
    }
