"""Benchmarks whose contenders start many processes: they are measured in turn, and what they found is written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.arena import compete
from benchmarks.contenders import Task
from benchmarks.offload import run


def test_contenders_are_measured_in_turn_and_a_failing_one_is_reported() -> None:
    task = Task(precision="fp32", small_layers=4)
    results = compete(["plain", "ddp", "fsdp2-stage2"], task, 2, rounds=2, steps=3)
    assert results["plain"].error == results["ddp"].error == ""
    assert [len(results[name].quiet + results[name].loud) for name in ("plain", "ddp", "fsdp2-stage2")] == [6, 6, 6]
    assert results["ddp"].peak_bytes > 50 * 2**20
    assert results["fsdp2-stage2"].loss == pytest.approx(results["ddp"].loss, rel=1e-3)
    broken = compete(["plain"], Task(precision="fp32", num_heads=0), 1, rounds=1, steps=1)
    assert "num_heads" in broken["plain"].error


def test_the_offload_benchmark_runs_its_phases_small_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(
        device="cpu",
        phases=["step-host", "largest", "link"],
        minutes=5.0,
        ranks=1,
        rounds=1,
        layers=1,
        hidden=64,  # bf16 products take 58 times as long as fp32 on a processor without bf16 instructions
        sequences=1,
        folder=tmp_path / "disk",
        out=tmp_path / "found.json",
    )
    run(arguments)
    found = json.loads((tmp_path / "found.json").read_text())["phases"]
    rows = {row["contender"]: row for row in found["step-host"]["rows"]}
    assert rows["shoal-host"]["loss"] == rows["shoal-2"]["loss"]
    assert rows["shoal-host"]["times_as_fast_as_fsdp2-host"] > 0
    assert 200_000 < found["largest"]["largest"] < 4_000_000
    assert "error" in found["link"]  # there is no GPU: the phase fails, the others do not
    assert "the largest that trained" in capsys.readouterr().out
