"""The benchmarks' own arithmetic, and that their processes start, answer and end."""

from __future__ import annotations

import pytest

from benchmarks.arena import Result, compete, table
from benchmarks.contenders import Task
from benchmarks.memory import formula_bytes


def test_the_memory_formula_is_the_papers() -> None:
    # 7.5 billion parameters on 64 ranks: figure 1 of arXiv:1910.02054, in GB.
    figures = [round(formula_bytes(stage, 7_500_000_000, 64, "bf16") / 1e9, 1) for stage in range(4)]
    assert figures == [120.0, 31.4, 16.6, 1.9]


def test_quiet_steps_count_alone_where_there_are_enough() -> None:
    few = Result("x", quiet=[1.0, 1.0], loud=[3.0, 3.0, 3.0])
    many = Result("x", quiet=[1.0] * 5, loud=[3.0] * 20)
    assert few.as_dict(2.0)["ms"] == 3000.0
    assert many.as_dict(2.0)["ms"] == 1000.0
    assert many.as_dict(2.0)["ratio"] == 0.5


def test_a_table_keeps_names_left_and_numbers_right() -> None:
    assert table([["name", "ms"], ["plain", "7.0"]]) == "name    ms\n-----  ---\nplain  7.0"


@pytest.mark.gloo
def test_contenders_are_measured_in_turn_and_a_failing_one_is_told_of() -> None:
    task = Task(precision="fp32", small_layers=4)
    results = compete(["plain", "ddp", "fsdp2-stage2"], task, 2, rounds=2, steps=3)
    assert results["plain"].error == results["ddp"].error == ""
    assert [len(results[name].quiet + results[name].loud) for name in ("plain", "ddp", "fsdp2-stage2")] == [6, 6, 6]
    assert results["ddp"].peak_bytes > 50 * 2**20
    assert results["fsdp2-stage2"].loss == pytest.approx(results["ddp"].loss, rel=1e-3)
    broken = compete(["plain"], Task(precision="fp32", num_heads=0), 1, rounds=1, steps=1)
    assert "num_heads" in broken["plain"].error
