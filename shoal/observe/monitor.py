"""Named values over steps, written by rank 0 to the writers that the config enables.

monitor = Monitor([JsonLinesWriter(folder / "metrics.jsonl"), TensorBoardWriter(folder / "tensorboard")])
monitor.write_events([("train/loss", 2.5, 10), ("train/learning_rate", 1e-3, 10)])
"""

from __future__ import annotations

import csv
import errno
import json
import logging
import math
import os
import re
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from shoal.errors import UsageError
from shoal.observe.metrics import metric
from shoal.optional import import_optional

if TYPE_CHECKING:
    from shoal.config import Config

logger = logging.getLogger("shoal")
Event = tuple[str, float, int]  # name, value, step (or samples: any count that grows)
_OTHERWISE = "leave it out of the config"


class MonitorWriter(Protocol):
    """Writes events to one destination."""

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Passes events to its writers. Without writers (on all ranks but 0) it does nothing.

    Args:
        writers: where to write; the monitor closes them.
    """

    def __init__(self, writers: Iterable[MonitorWriter] = ()) -> None:
        self._writers = list(writers)
        self._closing = weakref.finalize(self, _close_all, self._writers)

    @property
    def writers(self) -> Sequence[MonitorWriter]:
        return self._writers

    @property
    def enabled(self) -> bool:
        return bool(self._writers)

    def write_events(self, events: Sequence[Event]) -> None:
        """Write values of one or several steps. Tensors of one element are read, which blocks the host.

        A writer that cannot write any more is closed, with a warning.
        """
        if not self.enabled:
            return
        plain = [(name, float(value), int(step)) for name, value, step in events]
        for writer in list(self._writers):
            try:
                writer.write(plain)
            except OSError as error:  # a full disk: no reason to end a training
                self._writers.remove(writer)
                logger.warning("%s cannot write and is closed; training goes on: %s", type(writer).__name__, error)
                _close_all([writer])

    def close(self) -> None:
        """Flush and close the writers; also done when the process ends. Idempotent."""
        self._closing()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close_all(writers: list[MonitorWriter]) -> None:
    try:
        for writer in writers:
            with suppress(OSError):  # what a full disk does not take was reported
                writer.close()
    finally:
        writers.clear()


class JsonLinesWriter:
    """One JSON object per line and step: ``{"step": 10, "time": ..., "train/loss": 2.5}``.

    ``time`` is in seconds since 1970. JSON has no NaN: values that are not finite are the strings "NaN", "Infinity" and
    "-Infinity", which ``float()`` reads. Every line is flushed, so that a killed run leaves its log.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, events: Sequence[Event]) -> None:
        now = round(time.time(), 3)
        for step, values in _by_step(events).items():
            shown = {name: value if math.isfinite(value) else _name_of(value) for name, value in values.items()}
            self._file.write(json.dumps({"step": step, "time": now, **shown}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvWriter:
    """A file per name, ``train_loss.csv`` for ``train/loss``, with the columns ``step`` and the name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            csv.writer(self._file(name)).writerow([step, value])
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / (name.replace("/", "_") + ".csv")
            is_new = not path.exists()
            self._files[name] = path.open("a", encoding="utf-8", newline="")
            if is_new:
                csv.writer(self._files[name]).writerow(["step", name])
        return self._files[name]


class TensorBoardWriter:
    """Event files, for ``tensorboard --logdir``.

    Raises: UsageError: the ``tensorboard`` package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        import_optional("tensorboard", "writing TensorBoard events", "tensorboard", _OTHERWISE)
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases.

    Raises: UsageError: the ``wandb`` package is not installed.
    """

    def __init__(self, project: str, *, group: str | None = None, team: str | None = None) -> None:
        wandb = import_optional("wandb", "logging to Weights & Biases", "'shoal[wandb]'", _OTHERWISE)
        self._run: Any = wandb.init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Event]) -> None:
        for step, values in sorted(_by_step(events).items()):
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class CometWriter:
    """Comet.

    Args:
        every: samples between two values of one name; those between are left out.
        name: of the experiment; None: Comet's choice.
        start: handed to ``comet_ml.start``: project, workspace, api_key and the like. None there: as Comet's own
            configuration has it.

    Raises: UsageError: the ``comet_ml`` package is not installed.
    """

    def __init__(self, *, every: int = 1, name: str | None = None, **start: Any) -> None:
        comet = import_optional("comet_ml", "logging to Comet", "'shoal[comet]'", _OTHERWISE)
        self.experiment: Any = comet.start(**start)
        self._every = every
        self._last: dict[str, int] = {}
        if name is not None:
            self.experiment.set_name(name)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in self._last or step - self._last[name] >= self._every:
                self._last[name] = step
                self.experiment.log_metric(name, value, step=step)

    def close(self) -> None:
        self.experiment.end()


class MlflowWriter:
    """MLflow.

    Args:
        tracking_uri: server or folder; ``experiment``, ``run``: names. None: MLflow's own choice. A run that the script
            has started is used, and left open.

    Raises: UsageError: the ``mlflow`` package is not installed.
    """

    def __init__(
        self, *, tracking_uri: str | None = None, experiment: str | None = None, run: str | None = None
    ) -> None:
        self._mlflow = import_optional("mlflow", "logging to MLflow", "'shoal[mlflow]'", _OTHERWISE)
        if tracking_uri is not None:
            self._mlflow.set_tracking_uri(tracking_uri)
        if experiment is not None:
            self._mlflow.set_experiment(experiment)
        active = self._mlflow.active_run()
        self._is_own = active is None
        self._run: Any = self._mlflow.start_run(run_name=run) if active is None else active

    def write(self, events: Sequence[Event]) -> None:
        for step, values in sorted(_by_step(events).items()):
            self._mlflow.log_metrics(values, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


class PrometheusWriter:
    """The last value of each name as a gauge, at ``http://address:port/metrics``; ``Train/Samples/lr`` is
    ``shoal_train_samples_lr``, and ``shoal_step`` what it was written with.

    Raises: UsageError: the ``prometheus_client`` package is not installed, or the address cannot be listened at.
    """

    def __init__(self, address: str, port: int) -> None:
        self._client = import_optional("prometheus_client", "serving Prometheus", "'shoal[prometheus]'", _OTHERWISE)
        self._registry: Any = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, _ = self._client.start_http_server(port, addr=address, registry=self._registry)
        except OSError as error:
            raise UsageError(
                f"prometheus cannot listen at {address}:{port}: {error.strerror or error}.",
                do="set prometheus.port to one that is free, and prometheus.address to one of this machine.",
                code="monitor-port",
            ) from error

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._gauge(name).set(value)
            self._gauge("step").set(step)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            unit, meaning = metric(name) or ("", "")
            text = ": ".join(filter(None, (name, f"{meaning} ({unit})" if unit else meaning)))
            self._gauges[name] = self._client.Gauge(gauge_name(name), text, registry=self._registry)
        return self._gauges[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def gauge_name(name: str) -> str:
    """
    >>> gauge_name("Train/Samples/train_loss")
    'shoal_train_samples_train_loss'
    """
    return "shoal_" + re.sub(r"\W", "_", name.lower(), flags=re.ASCII)


def _by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    by_step: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        by_step.setdefault(step, {})[name] = value
    return by_step


def read_json_lines(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The series of a ``JsonLinesWriter``'s file: name -> (step, value) in the order of writing.

    An incomplete last line, which a killed run may leave, is ignored.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if index == len(lines) - 1:
                break
            raise UsageError(f"line {index + 1} is not JSON: {error}", where=str(path)) from error
        for name, value in record.items():
            if name not in ("step", "time"):
                series.setdefault(name, []).append((int(record["step"]), float(value)))
    return series


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def is_monitored(config: Any) -> bool:
    """True if the config's sections ask for a monitor. (Only rank 0 has it.)"""
    sections = (config.tensorboard, config.csv_monitor, config.wandb, config.comet, config.mlflow, config.prometheus)
    return any(section.enabled for section in sections)


def make_monitor(config: Config, rank: int) -> Monitor | None:
    """The monitor that the config's sections ask for; None where there is none, and on every rank but 0."""
    if rank != 0:
        return None
    writers: list[MonitorWriter] = []
    if config.tensorboard.enabled:
        folder = _folder(config.tensorboard, "tensorboard")
        try:
            writers.append(TensorBoardWriter(folder))
        except OSError as error:
            raise _unusable(folder, "tensorboard", error) from error
    if config.csv_monitor.enabled:
        writers.append(CsvWriter(_folder(config.csv_monitor, "csv")))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb.project, group=config.wandb.group, team=config.wandb.team))
    if config.comet.enabled:
        comet = config.comet
        given = comet.model_dump(include={"api_key", "project", "workspace", "experiment_key", "mode", "online"})
        writers.append(CometWriter(every=comet.samples_log_interval, name=comet.experiment_name, **given))
    if config.mlflow.enabled:
        mlflow = config.mlflow
        writers.append(
            MlflowWriter(tracking_uri=mlflow.tracking_uri, experiment=mlflow.experiment_name, run=mlflow.run_name)
        )
    if config.prometheus.enabled:
        writers.append(PrometheusWriter(config.prometheus.address, config.prometheus.port))
    return Monitor(writers) if writers else None


def _folder(section: Any, kind: str) -> Path:
    """The folder of a writer's files. Raises: UsageError: it cannot be made or written to."""
    folder = Path(str(section.output_path or Path("runs") / kind), str(section.job_name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(folder, kind, error) from None
    return folder


def _unusable(folder: Path, kind: str, error: OSError) -> UsageError:
    return UsageError(
        f"the folder for {kind} files cannot be used: {error.strerror}.",
        where=str(folder),
        do="set output_path to a folder with room that this user may write to.",
        code="monitor-folder",
    )
