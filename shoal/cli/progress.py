"""The terminal output of a run: a progress bar where there is a terminal, a line at each validation everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track

from shoal.observe.monitor import Event
from shoal.text import format_bytes, format_count

_PARTS = 10_000  # of a whole run, for the bar


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
