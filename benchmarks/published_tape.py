"""A dry run as a tape: what it queued and what waited for what, so that it can be timed anew without an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

from shoal.simulation import clocks, dry_run, times
from shoal.simulation.clocks import Clock, TimedOperation
from shoal.simulation.kernels import Kernel
from shoal.simulation.machines import GpuNode
from shoal.simulation.memory import MemoryPeak
from shoal.simulation.times import Cost, StreamTimes


@dataclass(frozen=True)
class _NamedCost(Cost):
    call: tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]] = ("", (), ())


@dataclass
class Tape:
    """Of the last step of each stage.

    Attributes: ``events``: ("add", clock, call, number of a message that it sends or 0, stage), ("wait", clock,
    message, stage), ("join", clock, other), ("copy", new clock, other) and ("mark", clock, name).
    """

    events: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    num_ranks: int = 1
    num_times: int = 0
    num_micro: int = 1
    peaks: list[Any] = field(default_factory=list)
    _clocks: dict[int, tuple[int, Clock]] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _sent: dict[float, int] = field(default_factory=dict)

    def clock(self, clock: Clock) -> int:
        return self._clocks.setdefault(id(clock), (len(self._clocks), clock))[0]

    def call(self, call: Any) -> int:
        if call not in self._numbers:
            self._numbers[call] = len(self.calls)
            self.calls.append(call)
        return self._numbers[call]

    def mark(self, run: Any, name: str = "micro") -> None:
        self.events.append(("mark", self.clock(run._accelerator.compute.clock), name))

    def finish(self, runs: Sequence[Any]) -> None:
        """The run has ended."""
        self.num_ranks = runs[0].world.size
        self.peaks = [run.steps[-1].memory for run in runs]
        self._clocks, self._numbers, self._sent = {}, {}, {}

    def as_json(self) -> dict[str, Any]:
        peaks = [asdict(peak) for peak in self.peaks]
        calls = [[name, [_plain(each) for each in args], dict(kwargs)] for name, args, kwargs in self.calls]
        numbers = {"num_ranks": self.num_ranks, "num_times": self.num_times, "num_micro": self.num_micro}
        return {**numbers, "events": self.events, "calls": calls, "peaks": peaks}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Tape:
        calls = [(name, tuple(map(_of_plain, args)), tuple(kwargs.items())) for name, args, kwargs in saved["calls"]]
        return cls(**{**saved, "calls": calls, "peaks": [MemoryPeak(**peak) for peak in saved["peaks"]]})


def _plain(argument: Any) -> Any:
    """Of a call, for JSON."""
    if isinstance(argument, Kernel):
        return {**asdict(argument), "dtype": str(argument.dtype).removeprefix("torch.")}
    return argument


def _of_plain(argument: Any) -> Any:
    if isinstance(argument, dict):
        return Kernel(**{**argument, "dtype": getattr(torch, argument["dtype"]), "shape": tuple(argument["shape"])})
    return tuple(argument) if isinstance(argument, list) else argument


class _RecordedTimes(StreamTimes):
    tape: Tape

    def __init__(self, machine: GpuNode, num_ranks: int) -> None:
        super().__init__(machine, num_ranks)
        self.number = self.tape.num_times
        self.tape.num_times += 1

    def add(self, stream: Any, name: str, cost: Cost) -> None:
        super().add(stream, name, cost)
        if isinstance(cost, _NamedCost):
            made = self.operations[-1]
            self.tape.events.append(("add", self.tape.clock(stream.clock), self.tape.call(cost.call), 0, self.number))
            if cost.call[1][:1] == ("send",):
                number = self.tape._sent[made.start] = len(self.tape.events) - 1
                self.tape.events[-1] = (*self.tape.events[-1][:3], number + 1, self.number)

    def add_received(self, stream: Any, name: str, sent: float, cost: Cost) -> None:
        number = self.tape._sent.get(sent)
        if number is not None:
            self.tape.events.append(("wait", self.tape.clock(stream.clock), number, self.number))
        if sent > stream.clock.seconds:
            stream.tick()
            super().add(stream, name, Cost(times.STAGES, sent - stream.clock.seconds))
        stream.tick()
        self.add(stream, name, cost)


def _named(method: str) -> Any:
    original = getattr(StreamTimes, method)

    def made(self: StreamTimes, *args: Any, **kwargs: Any) -> Cost:
        cost = original(self, *args, **kwargs)
        return _NamedCost(**vars(cost), call=(method, args, tuple(kwargs.items())))

    return made


@contextmanager
def recording() -> Iterator[Tape]:
    """Inside the block, dry runs write on the tape."""
    tape = Tape()
    join, copy = Clock.join, Clock.copy

    def joined(self: Clock, other: Clock) -> None:
        join(self, other)
        if self is not other:
            tape.events.append(("join", tape.clock(self), tape.clock(other)))

    def copied(self: Clock) -> Clock:
        made = copy(self)
        tape.events.append(("copy", tape.clock(made), tape.clock(self)))
        return made

    kind = type("_Times", (_RecordedTimes,), {"tape": tape})
    for method in ("kernel_cost", "copy", "collective", "on_host", "disk", "launch"):
        setattr(kind, method, _named(method))
    step = dry_run.DryRun.step

    @contextmanager
    def stepped(self: Any) -> Iterator[None]:
        tape.mark(self, "begin")
        with step(self):
            yield
        tape.mark(self, "end")

    with (
        mock.patch.object(clocks.Clock, "join", joined),
        mock.patch.object(clocks.Clock, "copy", copied),
        mock.patch.object(dry_run, "StreamTimes", kind),
        mock.patch.object(dry_run.DryRun, "step", stepped),
    ):
        yield tape


class _Clock(dict[Any, int]):
    """Of a replay: only the operation that ends last."""

    last: TimedOperation | None = None

    @property
    def seconds(self) -> float:
        return 0.0 if self.last is None else self.last.end


class _Stream:
    def __init__(self) -> None:
        self.name, self.clock = "", _Clock({self: 0})


def replayed(tape: Tape, machine: GpuNode) -> tuple[float, float, float]:
    """Seconds of a micro-batch, of the rest of the last step, and that the host needs to queue a micro-batch."""
    stages = [StreamTimes(machine, tape.num_ranks) for _ in range(tape.num_times)]
    costs = [getattr(stages[0], name)(*args, **dict(kwargs)) for name, args, kwargs in tape.calls]
    streams: dict[int, Any] = defaultdict(_Stream)
    marks: dict[str, list[float]] = defaultdict(list)
    host, hosts = 0.0, [0.0]  # of the last stage, when steps begin and at the end of micro-batches
    messages: dict[int, TimedOperation] = {}
    for event in tape.events:
        what, mine = event[0], streams[event[1]]
        if what == "add":
            timed = stages[event[4]]
            if event[4] == tape.num_times - 1 and costs[event[2]].kind == times.HOST:
                host += costs[event[2]].seconds
            timed.add(mine, "", costs[event[2]])
            if event[3]:
                messages[event[3] - 1] = timed.operations[-1]
        elif what == "join":
            other = streams[event[2]].clock
            if other.last is not None and other.last.end > mine.clock.seconds:
                mine.clock.last = other.last
        elif what == "copy":
            mine.clock.last = streams[event[2]].clock.last
        elif what == "wait":
            sent = messages[event[2]]
            if sent.start > mine.clock.seconds:
                stages[event[3]].add(mine, "", Cost(times.STAGES, sent.start - mine.clock.seconds))
        else:
            marks[event[2]].append(mine.clock.seconds)
            if event[2] != "end":
                hosts.append(host)
    last = tape.num_times  # of the marks "begin" and "end": one of each stage
    begin, end, micro = min(marks["begin"][-last:]), max(marks["end"][-last:]), marks["micro"]
    if last == 1:
        first = micro[-1] - begin
        return first, end - begin - tape.num_micro * first, hosts[-1] - hosts[-2]
    slot = micro[-1] - micro[-2]
    return slot, end - begin - slot * (tape.num_micro + last - 1), hosts[-1] - hosts[-2]
