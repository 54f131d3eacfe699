"""Events, and the places they go to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.observe.monitor import CsvWriter, JsonLinesWriter, Monitor, TensorBoardWriter, read_json_lines


def test_events_of_one_step_are_one_json_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    with Monitor([JsonLinesWriter(path)]) as monitor:
        monitor.write_events([("train/loss", 2.5, 10), ("train/lr", 0.1, 10), ("train/loss", 2.4, 11)])
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["step"], first["train/loss"], first["train/lr"]) == (10, 2.5, 0.1)
    assert (second["step"], second["train/loss"]) == (11, 2.4)
    assert first["time"] > 1.6e9


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Monitor([JsonLinesWriter(path)]) as monitor:
        monitor.write_events([("loss", math.nan, 1)])
        monitor.write_events([("loss", -math.inf, 2)])
    assert "NaN" in json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)["loss"]
    (_, first), (_, second) = read_json_lines(path)["loss"]
    assert math.isnan(first)
    assert second == -math.inf


def test_a_last_line_cut_short_is_passed_over_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0, "loss": 3.0}\n{"step": 2, "ti')
    assert read_json_lines(path) == {"loss": [(1, 3.0)]}
    path.write_text('{"step"\n{"step": 2, "time": 0, "loss": 3.0}\n')
    with pytest.raises(UsageError, match="line 1 is not JSON"):
        read_json_lines(path)


def test_each_name_has_its_csv_file_that_a_second_run_goes_on_with(tmp_path: Path) -> None:
    for step in (1, 2):
        with Monitor([CsvWriter(tmp_path)]) as monitor:
            monitor.write_events([("train/loss", 0.5 * step, step)])
    assert (tmp_path / "train_loss.csv").read_text().splitlines() == ["step,train/loss", "1,0.5", "2,1.0"]


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    with Monitor([TensorBoardWriter(tmp_path)]) as monitor:
        monitor.write_events([("train/loss", 2.5, 7)])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (7, 2.5)


def test_a_monitor_without_writers_reads_no_value() -> None:
    class Unreadable:
        def __float__(self) -> float:
            raise AssertionError("a tensor was read, which would block the host")

    monitor = Monitor()
    assert not monitor.enabled
    monitor.write_events([("loss", Unreadable(), 1)])  # type: ignore[list-item]
