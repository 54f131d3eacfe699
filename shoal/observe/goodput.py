"""Where the time of a run went, over all its starts: a log of sections, and its reading by categories.

    {"time": ..., "event": "start", "began": ..., "init": 2.1, "step": 0, "ranks": 8}           a line for each start
    {"time": ..., "event": "sections", "step": 120, "seconds": {"step": 9.1, "data": 0.4, ...}}  and every 10 seconds
    {"time": ..., "event": "ranks", "step": 53, "ms": {"forward": [31.2, 30.9, ...], ...}, "own": {...}}
    {"time": ..., "event": "sources", "step": 53, "seconds": {"notes": 1.2, ...}}   reading on rank 0, since the start

``ms`` has a number for each rank; so has ``own``, of a rank's own work, without its waits for others.

Times are in seconds since 1970; ``seconds`` is what each section took since the line before. What was done after the
checkpoint that the next start loads was in vain, and the time until that start is that of the failure.

Source of the categories: Google, ml-goodput-measurement.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from shoal.errors import UsageError
from shoal.process import started

GOODPUT_FILE = "goodput.jsonl"
_LINE_SECONDS = 10.0

CATEGORIES = {
    "productive": "forward, backward and step, of steps that count",
    "data": "the script's own work between steps, such as loading a batch",
    "compile": "the first step of a compiled model",
    "evaluation": "forward without gradients",
    "checkpoint save": "",
    "checkpoint restore": "",
    "start-up": "from the start of the process to initialize",
    "initialization": "initialize",
    "lost progress": "steps after the checkpoint from which the next start went on",
    "recovery": "from the last sign of a start to the next one",
    "elastic change": "the same, where the number of ranks changed",
}


class GoodputLog:
    """Writes the log of one start; told of each section that begins. Rank 0 has one."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._num_ranks = num_ranks
        self._entered = time.time()  # initialize begins
        self._section = "init"
        self._step = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._written_at = self._entered
        self._began = _process_began(self._entered)

    def enter(self, section: str, step: int) -> None:
        """A section begins, ``step`` steps are done."""
        now = time.time()
        self._seconds[self._section] += now - self._entered
        if self._section == "init" and section != "init":
            init = self._seconds.pop("init")
            self._write({"event": "start", "began": self._began, "init": init, "step": step, "ranks": self._num_ranks})
        is_due = now - self._written_at >= _LINE_SECONDS or "checkpoint" in (section, self._section)
        self._entered, self._section, self._step = now, section, step
        if is_due and section != "init":
            self._flush()

    def write_ranks(self, row: RankTimesRow) -> None:
        """The times of a step. Phases that took none are left out."""
        ms, own = (
            {phase: [round(each, 2) for each in ranks] for phase, ranks in times.items() if any(ranks)}
            for times in (row.milliseconds, row.own)
        )
        stages = {"stages": row.stages} if any(row.stages) else {}
        self._write({"event": "ranks", "step": row.step, "ms": ms, "own": own, **stages})

    def write_sources(self, step: int, seconds: Mapping[str, float]) -> None:
        """What rank 0 has spent on reading each source so far."""
        shown = {name: round(value, 4) for name, value in seconds.items()}
        self._write({"event": "sources", "step": step, "seconds": shown})

    def _flush(self) -> None:
        seconds = {section: round(value, 4) for section, value in self._seconds.items()}
        self._seconds.clear()
        self._written_at = time.time()
        self._write({"event": "sections", "step": self._step, "seconds": seconds})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **line}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write the rest. Idempotent."""
        if not self._file.closed:
            self.enter("data", self._step)
            self._flush()
            self._file.close()


def _process_began(otherwise: float) -> float:
    """When this process began, in seconds since 1970."""
    ticks = started(os.getpid())
    if ticks is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return otherwise
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _LoggedSections:
    before: int  # steps done
    after: int
    seconds: Mapping[str, float]  # by section
    is_before_steps: bool  # of its start


@dataclass(frozen=True)
class RankTimesRow:
    """Milliseconds of one step by phase, in each a number for each rank (``engine.parts.rank_times``).

    Args:
        own: of a rank's own work: without the phases in which it waits for others.
        stages: the coordinate of each rank on ``pp``; empty: there is one.
    """

    step: int
    milliseconds: Mapping[str, Sequence[float]]
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    stages: Sequence[int] = ()

    def compared(self) -> Iterator[OwnWork]:
        """Each rank with the others of its pipeline stage; and each stage with the others, since a schedule gives all
        as many passes and expects them to take the same time.
        """
        if not self.own:
            return
        whole = [sum(of_rank) for of_rank in zip(*self.own.values(), strict=True)]
        stages = self.stages or [0] * len(whole)
        ranks_of = {stage: [rank for rank, other in enumerate(stages) if other == stage] for stage in {*stages}}
        pairs: list[tuple[list[int], int | None, Sequence[int]]]
        pairs = [([rank], None, ranks_of[stage]) for rank, stage in enumerate(stages)]
        if len(ranks_of) > 1:
            pairs += [(ranks, stage, range(len(whole))) for stage, ranks in ranks_of.items()]
        for ranks, of_stage, group in pairs:
            others = [rank for rank in group if rank not in ranks]
            if others:
                own, usual = (
                    {phase: median_low(times[rank] for rank in each) for phase, times in self.own.items()}
                    for each in (ranks, others)
                )
                total, usual_total = (median_low(whole[rank] for rank in each) for each in (ranks, others))
                yield OwnWork(tuple(ranks), of_stage, own, usual, total, usual_total)


@dataclass(frozen=True)
class OwnWork:
    """The own work of a rank, or of a pipeline stage, in one step, next to the median of the others'.

    Args:
        stage: None: this is one rank of a stage.
        own, usual: milliseconds by phase. ``total``, ``usual_total``: of all of them.
    """

    ranks: tuple[int, ...]
    stage: int | None
    own: Mapping[str, float]
    usual: Mapping[str, float]
    total: float
    usual_total: float

    @property
    def factor(self) -> float:
        """How many times as long it takes."""
        return self.total / max(self.usual_total, 1e-9)


@dataclass
class Start:
    """One start of the program, from ``began`` to its last sign, ``ended``: seconds since 1970."""

    began: float
    ended: float
    init: float
    num_ranks: int
    restored: int  # the step from which it went on
    lines: list[_LoggedSections] = field(default_factory=list)
    ranks: list[RankTimesRow] = field(default_factory=list)
    sources: Mapping[str, float] = field(default_factory=dict)  # seconds of reading, by name

    @property
    def last_step(self) -> int:
        return self.lines[-1].after if self.lines else self.restored

    def add(self, time: float, step: int, seconds: Mapping[str, float]) -> None:
        is_before_steps = "step" not in seconds and all(line.is_before_steps for line in self.lines)
        if is_before_steps:
            self.restored = step
        before = self.last_step if "step" in seconds else step
        self.lines.append(_LoggedSections(before, step, seconds, is_before_steps))
        self.ended = time


@dataclass(frozen=True)
class RunTime:
    """The time of a run by category, in seconds. ``starts``: of the program. ``num_saves``: of checkpoints."""

    seconds: Mapping[str, float]
    starts: Sequence[Start]
    num_steps: int
    num_saves: int

    @property
    def num_starts(self) -> int:
        return len(self.starts)

    @property
    def ranks(self) -> Sequence[RankTimesRow]:
        """Of all starts."""
        return [row for start in self.starts for row in start.ranks]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The productive part of the time."""
        return self.seconds["productive"] / self.total if self.total else 0.0

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Category, seconds, share and what it is; the largest first, without those that took none."""
        shown = sorted(((value, name) for name, value in self.seconds.items() if value > 0.0), reverse=True)
        return [(name, f"{value:,.1f}", f"{value / self.total:.1%}", CATEGORIES[name]) for value, name in shown]


def read_goodput(path: Path) -> RunTime:
    """Read a log.

    Raises: UsageError: there is no such file, or it has no start.
    """
    starts = _starts(path)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        seconds["initialization"] += start.init
        accounted = start.init + sum(sum(line.seconds.values()) for line in start.lines)
        seconds["start-up"] += max(0.0, start.ended - start.began - accounted)
        kept = start.last_step if following is None else following.restored
        for line in start.lines:
            first_lost = max(line.before, kept)
            lost = (line.after - first_lost) / (line.after - line.before) if line.after > first_lost else 0.0
            for section, value in line.seconds.items():
                if section in ("step", "data"):
                    seconds["lost progress"] += lost * value
                    seconds["productive" if section == "step" else "data"] += (1.0 - lost) * value
                elif section == "checkpoint":
                    seconds["checkpoint restore" if line.is_before_steps else "checkpoint save"] += value
                else:
                    seconds[section] += value
        if following is not None:
            is_change = following.num_ranks != start.num_ranks
            seconds["elastic change" if is_change else "recovery"] += max(0.0, following.began - start.ended)
    num_steps = starts[-1].last_step - starts[0].restored
    num_saves = sum(
        "checkpoint" in line.seconds and not line.is_before_steps for start in starts for line in start.lines
    )
    return RunTime(seconds, starts, num_steps, num_saves)


def _starts(path: Path) -> Sequence[Start]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.", do="name a goodput.jsonl.") from error
    starts: list[Start] = []
    for line in text.splitlines():
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a start that was killed
        if read.get("event") == "start":
            starts.append(Start(read["began"], read["time"], read["init"], read["ranks"], read["step"]))
        elif starts and read.get("event") == "sections":
            starts[-1].add(read["time"], read["step"], read["seconds"])
        elif starts and read.get("event") == "ranks":
            starts[-1].ranks.append(RankTimesRow(read["step"], read["ms"], read.get("own", {}), read.get("stages", ())))
        elif starts and read.get("event") == "sources":
            starts[-1].sources = read["seconds"]
    if not starts:
        raise UsageError(f"{str(path)!r} has no start of a run.", do="name a goodput.jsonl that a run has written.")
    return starts
