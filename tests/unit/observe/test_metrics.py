"""One table of names: what is logged is in it, what is in it is logged, and every writer writes those names."""

from __future__ import annotations

import ast
import json
import re
import socket
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.progress import Reading
from shoal.config import load
from shoal.engine.progress import StepNumbers, _events
from shoal.observe.expert_load import load_events
from shoal.observe.metrics import METRICS, metric
from shoal.observe.monitor import JsonLinesWriter, Monitor, gauge_name, make_monitor, read_json_lines
from shoal.observe.report import RunRecord, render
from tests.unit.observe.test_monitor import Recorded

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name.replace("experts/*", "experts/layers.0").replace("*", "3") for name in METRICS]


def test_what_the_producers_log_is_the_table() -> None:
    times = {"forward": 1.0, "backward": 2.0, "reduce": 1.0, "step": 1.0}
    events = [
        *_events(8, StepNumbers([0.1], 2.5, 1.0, 2.0), times),
        *Reading(1, 2.5, 2.6, 100.0, 1.0, 0.1, 10, 20, 1.0).events(),
        *load_events({"layers.0": [1.0, 2.0, 3.0, 4.0]}, 1),
        ("validation/loss", 2.6, 1),  # as the literals below
    ]
    assert sorted({name for name in METRICS for event, *_ in events if metric(event) is METRICS[name]}) == sorted(
        METRICS
    )
    assert [event for event, *_ in events if metric(event) is None] == []


def test_no_other_name_is_written_anywhere() -> None:
    found: set[str] = set()
    for path in (ROOT / "shoal").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple) and len(node.elts) in (2, 3) and isinstance(node.elts[0], ast.Constant):
                text = node.elts[0].value
                if isinstance(text, str) and re.fullmatch(r"(train|Train|validation|memory|experts)/[A-Za-z_/]+", text):
                    found.add(text)
    assert {"train/loss", "validation/loss", "memory/peak_bytes"} <= found
    assert [name for name in found if metric(name) is None] == []


def test_a_scripts_own_name_is_not_in_the_table() -> None:
    assert metric("train/loss") == ("nats per token", "mean of all ranks' tokens since the last value")
    assert metric("experts/layers.0.mlp/load/12") == METRICS["experts/*/load/*"]
    assert metric("my/own") is metric("loss") is metric("Train/Samples/mine") is None


def test_every_writer_writes_the_names_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {name: Recorded() for name in ("wandb", "comet_ml", "mlflow")}
    fakes["mlflow"].__dict__ |= {"active_run": lambda: None, "info": SimpleNamespace(run_id="r")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config: dict[str, Any] = {name: {"enabled": True} for name in ("wandb", "comet", "mlflow")}
    config |= {"tensorboard": folder, "csv_monitor": folder, "prometheus": {"enabled": True, "port": port}}
    monitor = make_monitor(load({"train_batch_size": 1, **config}), 0)
    assert monitor is not None
    with monitor, Monitor([JsonLinesWriter(tmp_path / "metrics.jsonl")]) as lines:
        for each in (monitor, lines):
            each.write_events([(name, 2.5, 8) for name in NAMES])
        served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert list(read_json_lines(tmp_path / "metrics.jsonl")) == NAMES
    headers = [path.read_text().splitlines()[0] for path in (tmp_path / "job").glob("*.csv")]
    assert sorted(headers) == sorted(f"step,{name}" for name in NAMES)
    logged = {name: [args for verb, args, _ in fake.calls if verb.startswith("log")] for name, fake in fakes.items()}
    assert [list(args[0]) for args in logged["wandb"] + logged["mlflow"]] == [NAMES, NAMES]
    assert [args[0] for args in logged["comet_ml"]] == NAMES
    gauges = re.findall(r"^# TYPE (\S+) gauge", served, flags=re.MULTILINE)
    assert sorted(gauges) == sorted(["shoal_step", *map(gauge_name, NAMES)])
    assert "# HELP shoal_memory_peak_bytes memory/peak_bytes: of rank 0, the most until now (bytes)" in served
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(NAMES)


def test_a_chart_of_the_report_has_the_unit_of_the_table() -> None:
    page = render(RunRecord("run"), {"Train/Samples/elapsed_time_ms_step": [(1, 2.0)], "my/own": [(1, 2.0)]})
    assert "Train/Samples/elapsed_time_ms_step <small>milliseconds</small>" in page
    assert "<h2>my/own</h2>" in page


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        f"| `{name}` | {unit} | {text} | `{gauge_name(name)}` |"
        if "*" not in name
        else f"| `{name}` | {unit} | {text} | |"
        for name, (unit, text) in METRICS.items()
    ]
    assert "\n".join(["| name | unit | what it is | Prometheus |", "| --- | --- | --- | --- |", *rows, ""]) in page


def test_the_dashboard_has_names_of_the_table() -> None:
    text = json.dumps(json.loads((ROOT / "docs" / "how-to" / "grafana.json").read_text(encoding="utf-8")))
    shown = set(re.findall(r"shoal_\w+", text))
    assert shown
    assert shown <= {"shoal_step", *map(gauge_name, METRICS)}
