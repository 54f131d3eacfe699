"""Events, and the places they go to."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.config import load
from shoal.errors import UsageError
from shoal.observe.monitor import (
    CsvWriter,
    JsonLinesWriter,
    Monitor,
    TensorBoardWriter,
    gauge_name,
    make_monitor,
    read_json_lines,
)


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


def test_a_truncated_last_line_is_ignored_and_a_damaged_one_named(tmp_path: Path) -> None:
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


class Recorded:
    """A fake of a service's package, an experiment or a run: it records the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self

        return call


EVENTS = [("Train/loss", 2.5, 8), ("Train/lr", 0.1, 8), ("Train/loss", 2.0, 16), ("Train/loss", 1.5, 28)]


def test_weights_and_biases_gets_a_run_and_each_steps_values_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = load({"train_batch_size": 1, "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"}})
    assert make_monitor(config, rank=1) is None
    monitor = make_monitor(config, rank=0)
    assert monitor is not None
    with monitor:
        monitor.write_events(EVENTS)
    assert wandb.calls == [
        ("init", (), {"project": "p", "group": "g", "entity": "t"}),
        ("log", ({"Train/loss": 2.5, "Train/lr": 0.1},), {"step": 8}),
        ("log", ({"Train/loss": 2.0},), {"step": 16}),
        ("log", ({"Train/loss": 1.5},), {"step": 28}),
        ("finish", (), {}),
    ]


def test_comet_gets_an_experiment_and_values_at_the_given_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    comet = Recorded()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    section = {
        "enabled": True, "samples_log_interval": 20, "project": "p", "workspace": "w", "api_key": "secret",
        "experiment_name": "first", "experiment_key": "k", "online": False, "mode": "create",
    }  # fmt: skip
    config = load({"train_batch_size": 1, "comet": section})
    assert make_monitor(config, rank=1) is None
    monitor = make_monitor(config, rank=0)
    assert monitor is not None
    with monitor:
        monitor.write_events(EVENTS)
    start = {"project": "p", "workspace": "w", "api_key": "secret", "experiment_key": "k", "online": False}
    assert comet.calls == [
        ("start", (), {**start, "mode": "create"}),
        ("set_name", ("first",), {}),
        ("log_metric", ("Train/loss", 2.5), {"step": 8}),
        ("log_metric", ("Train/lr", 0.1), {"step": 8}),
        ("log_metric", ("Train/loss", 1.5), {"step": 28}),
        ("end", (), {}),
    ]
    assert "secret" not in repr(config.effective())


@pytest.mark.parametrize("is_started_by_the_script", [False, True])
def test_mlflow_gets_a_run_and_each_steps_values_at_once(
    is_started_by_the_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mlflow(Recorded):
        info = SimpleNamespace(run_id="id")

        def active_run(self) -> Any:
            return self if is_started_by_the_script else None

    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    section = {"enabled": True, "tracking_uri": "file:runs", "experiment_name": "e", "run_name": "r"}
    config = load({"train_batch_size": 1, "mlflow": section})
    assert make_monitor(config, rank=1) is None
    monitor = make_monitor(config, rank=0)
    assert monitor is not None
    with monitor:
        monitor.write_events(EVENTS)
    assert mlflow.calls == [
        ("set_tracking_uri", ("file:runs",), {}),
        ("set_experiment", ("e",), {}),
        *([] if is_started_by_the_script else [("start_run", (), {"run_name": "r"})]),
        ("log_metrics", ({"Train/loss": 2.5, "Train/lr": 0.1},), {"step": 8, "run_id": "id"}),
        ("log_metrics", ({"Train/loss": 2.0},), {"step": 16, "run_id": "id"}),
        ("log_metrics", ({"Train/loss": 1.5},), {"step": 28, "run_id": "id"}),
        *([] if is_started_by_the_script else [("end_run", (), {})]),
    ]


def fetch(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_prometheus_fetches_the_last_values_while_the_run_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = load({"train_batch_size": 1, "prometheus": {"enabled": True, "port": port}})
    monitor = make_monitor(config, rank=0)
    assert monitor is not None
    with monitor:
        monitor.write_events(EVENTS)
        assert fetch(port) == {"shoal_train_loss": 1.5, "shoal_train_lr": 0.1, "shoal_step": 28.0}
        with pytest.raises(UsageError, match=rf"monitor-port.*cannot listen at 127.0.0.1:{port}"):
            make_monitor(config, rank=0)
    with pytest.raises(OSError):
        fetch(port)


def test_the_dashboard_shows_values_that_the_engine_writes() -> None:
    dashboard = json.loads((Path(__file__).parents[3] / "docs" / "how-to" / "grafana.json").read_text())
    shown = {target["expr"].partition("{")[0] for panel in dashboard["panels"] for target in panel["targets"]}
    written = [f"Train/Samples/{name}" for name in ("lr", "train_loss", "loss_scale")]
    assert shown == {"shoal_step", *map(gauge_name, written)}


@pytest.mark.parametrize(
    ("section", "package"),
    [("wandb", "wandb"), ("comet", "comet_ml"), ("mlflow", "mlflow"), ("prometheus", "prometheus_client")],
)
def test_a_service_whose_package_is_missing_is_an_error_that_names_it(
    section: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = load({"train_batch_size": 1, section: {"enabled": True}})
    with pytest.raises(UsageError, match=rf"'{package}'(.|\n)*pip install 'shoal\[{section}\]'"):
        make_monitor(config, rank=0)


def test_a_process_that_ends_without_a_word_loses_no_value(tmp_path: Path) -> None:
    program = (
        "import shoal, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        f"section = {{'enabled': True, 'output_path': {str(tmp_path)!r}, 'job_name': 'job'}}\n"
        "config = {'train_batch_size': 1, 'tensorboard': section}\n"
        "config['optimizer'] = {'type': 'SGD', 'params': {'lr': 0.1}}\n"
        "engine = shoal.initialize(model=model, config=config)[0]\n"
        "engine.backward(engine(torch.ones(1, 2)).sum())\n"
        "engine.step()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [scalar.value for scalar in events.Scalars("Train/Samples/lr")] == [pytest.approx(0.1)]


def test_destroying_an_engine_closes_its_monitor(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "csv_monitor": section}
    engine = shoal.initialize(model=torch.nn.Linear(2, 2), config=settings)[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert engine.monitor.enabled
    engine.destroy()
    assert not engine.monitor.enabled
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()[1] == "1,0.1"


def test_a_disk_that_fills_up_ends_the_log_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "Train_Samples_train_loss.csv").symlink_to("/dev/full")
    with Monitor([CsvWriter(tmp_path), JsonLinesWriter(tmp_path / "log.jsonl")]) as monitor:
        for step in range(2):
            monitor.write_events([("Train/Samples/train_loss", 1.0, step)])
    assert caplog.text.count("CsvWriter cannot write and is closed; training goes on: [Errno 28] No space left") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_at_initialize_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter", full)
    section = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    with pytest.raises(UsageError, match="tensorboard files cannot be used: No space left on device") as caught:
        make_monitor(load(section), 0)
    assert caught.value.where == str(tmp_path / "run")
