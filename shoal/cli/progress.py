"""The terminal output of a run: a progress bar where there is a terminal, a line at each validation everywhere; and
``shoal watch RUN``, its last values from outside.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track
from rich.table import Table

from shoal.errors import UsageError
from shoal.observe.goodput import GOODPUT_FILE, read_goodput
from shoal.observe.monitor import Event, read_json_lines
from shoal.observe.report import METRICS_FILE
from shoal.text import format_bytes, format_count

_PARTS = 10_000  # of a whole run, for the bar
_WATCH_SECONDS = 2.0
_COLUMNS = 24
_BARS = "▁▂▃▄▅▆▇█"
_IN_BYTES = "_bytes"


@dataclass(frozen=True)
class Reading:
    """One logged step. Memory is rank 0's; times are in seconds."""

    step: int
    loss: float
    validation_loss: float
    tokens_per_second: float
    gradient_norm: float
    learning_rate: float
    allocated_bytes: int
    peak_bytes: int
    elapsed: float

    def events(self) -> list[Event]:
        values = [
            ("train/loss", self.loss),
            ("train/tokens_per_second", self.tokens_per_second),
            ("train/learning_rate", self.learning_rate),
            ("memory/allocated_bytes", float(self.allocated_bytes)),
            ("memory/peak_bytes", float(self.peak_bytes)),
        ]
        if not math.isnan(self.gradient_norm):
            values.append(("train/gradient_norm", self.gradient_norm))
        return [(name, value, self.step) for name, value in values]


class TrainingProgress:
    """The bar, and lines that go above it. Says nothing unless enabled (on rank 0).

    Order: ``show`` at most redraws ten times a second, whatever the length of a step.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=24),
            TextColumn("loss [bold]{task.fields[loss]}[/] val {task.fields[validation]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("{task.fields[memory]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            transient=True,
            disable=not enabled or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "train", total=_PARTS, start=False, step="0", loss="-", validation="-", rate="-", memory="-"
        )
        self._last: Reading | None = None

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        self._bar.start_task(self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, without interpreting markup."""
        if self._enabled:
            self._console.print(text, markup=False)

    def track(self, count: int, what: str) -> Iterable[int]:
        """``range(count)``, with a bar where there is a terminal."""
        return track(range(count), what, console=self._console, transient=True, disable=self._bar.disable)

    def show(self, reading: Reading, fraction: float) -> None:
        self._last = reading
        self._bar.update(
            self._task,
            completed=fraction * _PARTS,
            step=f"{reading.step:,}",
            loss=f"{reading.loss:.3f}",
            validation="-" if math.isnan(reading.validation_loss) else f"{reading.validation_loss:.3f}",
            rate=format_count(reading.tokens_per_second),
            memory=format_bytes(reading.allocated_bytes),
        )

    def show_validation(self, step: int, loss: float) -> None:
        line = f"step {step:>6,}   validation loss {loss:.3f}"
        if self._last is not None:
            line += (
                f"   training loss {self._last.loss:.3f}   {format_count(self._last.tokens_per_second)} tokens/s"
                f"   {format_bytes(self._last.allocated_bytes)}"
            )
        self.say(line)


def watch(folder: Path, *, once: bool) -> None:
    """Redraw every two seconds, or print once, as where the output is no terminal.

    Raises: UsageError: the folder has no metrics of a run.
    """
    console = Console()
    if once or not console.is_terminal:  # which shows nothing before the end
        console.print(_view(folder))
        return
    with suppress(KeyboardInterrupt), Live(_view(folder), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_SECONDS)
            live.update(_view(folder), refresh=True)


def _view(folder: Path) -> Table:
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UsageError(f"{str(folder)!r} holds no {METRICS_FILE}.", do="name the folder of a run of shoal train.")
    series = {name: points for name, points in read_json_lines(path).items() if points}
    step = max((points[-1][0] for points in series.values()), default=0)
    age = time.time() - path.stat().st_mtime
    table = Table(title=f"step {step:,}, {age:.0f} s ago{_goodput(folder)}: {folder}", title_justify="left", box=None)
    for header in ("", "last", "", "of the run"):
        table.add_column(header, justify="right" if header == "last" else "left", no_wrap=True)
    for name, points in series.items():
        values = [value for _, value in points]
        table.add_row(name, _shown(name, values[-1]), sparkline(values), _extent(name, values))
    return table


def _goodput(folder: Path) -> str:
    with suppress(UsageError):  # another program's run, or its first seconds
        return f", goodput {read_goodput(folder / GOODPUT_FILE).share:.1%}"
    return ""


def _shown(name: str, value: float) -> str:
    if name.endswith(_IN_BYTES):
        return format_bytes(int(value))
    return format_count(int(value)) if 1e4 <= abs(value) < math.inf else f"{value:.4g}"


def _extent(name: str, values: Sequence[float]) -> str:
    return f"{_shown(name, min(values))} to {_shown(name, max(values))}"


def sparkline(values: Sequence[float], columns: int = _COLUMNS) -> str:
    """The values as a row of bars, each the mean of as many.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 7.0])
    '▁▂▃▄█'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    size = max(1, -(-len(values) // columns))
    means = [sum(part) / len(part) for at in range(0, len(values), size) if (part := values[at : at + size])]
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / ((high - low) or 1.0) * (len(_BARS) - 1))] for mean in means)
