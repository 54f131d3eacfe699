"""The disk benchmark moves what it says, in turn, and cleans up; its ratios are to fio's rounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.disk import compete, summary


def test_contenders_are_measured_in_both_directions_and_leave_nothing(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        folder=tmp_path, size_mib=4, unit_mib=1, block_kib=256, depth=4, threads=2, buffers=2, rounds=2
    )
    found = compete(["shoal", "shoal-small-pages", "shoal-unaligned", "shoal-sums"], arguments)
    assert {len(rates) for figures in found.values() for rates in figures.values()} == {2}
    assert min(min(rates) for figures in found.values() for rates in figures.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    found = {
        "fio-libaio": {"write": [100.0, 200.0, 400.0], "read": [10.0, 10.0, 10.0]},
        "shoal": {"write": [90.0, 190.0, 600.0], "read": [9.0, 11.0, 30.0]},
    }
    assert summary(found)[2] == ["shoal", "190", "90-600", "0.95", "11", "9-30", "1.10"]
    del found["fio-libaio"]
    assert summary(found)[1] == ["shoal", "190", "90-600", "", "11", "9-30", ""]
