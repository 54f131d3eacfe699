"""ZeRO is a table: what each stage fills in, and how it prints."""

from __future__ import annotations

import pytest

from shoal.errors import PlacementError
from shoal.memory.placement import PARTIAL, REPLICATE, SHARD, Tier
from shoal.zero.table import Row, Table, row_of_stage


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
    assert row_of_stage(stage, "u").cells() == cells


def test_hybrid_sharding_leaves_the_sum_over_replicas_to_the_step() -> None:
    assert str(row_of_stage(3, "u", hybrid=True).gradient_between) == "Shard x Partial"
    assert str(row_of_stage(2, "u", hybrid=True).gradient_between) == "Shard x Partial"
    assert str(row_of_stage(1, "u", hybrid=True).gradient_between) == "Partial"


def test_a_persistent_unit_at_stage_3_rests_as_at_stage_2() -> None:
    assert row_of_stage(3, "u", persistent=True) == row_of_stage(2, "u")
    assert row_of_stage(1, "u", persistent=True) == row_of_stage(1, "u")


def test_a_second_sharding_is_said_beside_the_first() -> None:
    assert row_of_stage(3, "u", secondary=True).cells()[1] == "Shard + secondary"
    assert not row_of_stage(2, "u", secondary=True).secondary


def test_a_row_that_no_collective_can_execute_is_refused() -> None:
    with pytest.raises(PlacementError, match="from Replicate to Partial"):
        Row("u", REPLICATE, REPLICATE, PARTIAL, SHARD)
    with pytest.raises(PlacementError, match="from Shard to Partial"):
        Row("u", REPLICATE, SHARD, PARTIAL, SHARD)


def test_the_tier_is_a_column() -> None:
    row = Row("u", SHARD, SHARD, SHARD, SHARD, parameter_tier=Tier.DISK, state_tier=Tier.HOST)
    assert row.cells()[-1] == "disk/device/host"


def test_equal_rows_of_consecutive_units_print_as_one_line() -> None:
    table = Table((row_of_stage(2, "root"), *(row_of_stage(3, f"layers.{index}") for index in range(12))))
    lines = str(table).splitlines()
    assert len(lines) == 4  # headers, a rule, two kinds of rows
    assert lines[2].split()[:2] == ["root", "Replicate"]
    assert lines[3].startswith("layers.0 .. layers.11 (12)")
    assert table["layers.7"].unit == "layers.7"
    assert table.as_dict()[0] == {
        "unit": "root",
        "parameter at rest": "Replicate",
        "gradient between micro-batches": "Shard",
        "gradient at the step": "Shard",
        "master + optimizer state": "Shard",
        "after the step": "all_gather",
        "tier": "device",
    }
