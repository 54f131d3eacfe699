"""Milliseconds and memory of a step's phases: forward, gather, backward, reduce, step. Off unless asked for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.device import Device, MemoryReading

PHASES = ("forward", "gather", "backward", "reduce", "pipeline", "step")

# DeepSpeed's names of the phases.
_NAMES = {
    "fwd": "forward",
    "fwd_microstep": "forward",
    "bwd": "backward",
    "bwd_microstep": "backward",
    "bwd_allreduce": "reduce",
    "bwd_allreduce_microstep": "reduce",
    "step_microstep": "step",
}


class StepTimers:
    """Wall-clock time by phase. ``reduce`` runs inside ``backward`` and ``gather``, a wait for a unit's parameters,
    inside both passes; their times include it.

    Args:
        reads_memory: at the end of each phase the allocator is read.

    Order: with ``is_on`` the host waits for the device at both ends of a phase, so that reductions overlap with
        nothing on a GPU; else no time is measured.
    """

    def __init__(self, device: Device, *, is_on: bool, reads_memory: bool = False) -> None:
        self.is_on = is_on
        self.is_for_ranks = False  # on for ``RankTimes`` alone: nothing of it is logged or monitored
        self.reads_memory = reads_memory
        self._device = device
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._of_step: dict[str, float] = {}
        self._own: dict[str, float] = defaultdict(float)  # of the step, without the phases that ran inside
        self._inside = 0.0  # seconds of those, in the phase that runs now
        self.last_step: dict[str, float] = {}  # milliseconds, as ``end_step`` returned them
        self.last_own: dict[str, float] = {}  # of these, without the phases that ran inside
        self.memory: dict[str, MemoryReading] = {}  # at the last end of each phase
        self.began: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, seconds = self.now() if self.is_on else 0.0, 0.0
        around, self._inside = self._inside, 0.0
        try:
            yield
        finally:
            if self.is_on:
                seconds = self.now() - start
                self.add(name, seconds)
                self._own[name] += seconds - self._inside
            self._inside = around + seconds
            if self.reads_memory and name not in ("gather", "reduce"):
                self.memory[name] = self._device.memory()

    def __call__(self, name: str) -> PhaseTimer:
        """One phase's timer (``forward``, ``backward``, ``step``, or DeepSpeed's ``fwd``, ``bwd``), or one of the
        script's own, by any other name.
        """
        return PhaseTimer(self, _NAMES.get(name, name))

    def now(self) -> float:
        """Wait for the device. Returns: the time in seconds."""
        self._device.synchronize()
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        for sums in (self._seconds, self._of_step):
            sums[name] = sums.get(name, 0.0) + seconds
        self._counts[name] = self._counts.get(name, 0) + 1

    def milliseconds(self, name: str) -> tuple[float, int]:
        """A phase's milliseconds so far, and how often it ran."""
        return self._seconds.get(name, 0.0) * 1e3, self._counts.get(name, 0)

    def reset(self, name: str) -> None:
        self._seconds.pop(name, None)
        self._counts.pop(name, None)

    def end_step(self) -> dict[str, float]:
        """Milliseconds of the step that ends here, by phase, in the order of ``PHASES``."""
        phases = sorted(self._of_step.items(), key=lambda item: PHASES.index(item[0]) if item[0] in PHASES else 99)
        self.last_step = {name: seconds * 1e3 for name, seconds in phases}
        self.last_own = {name: seconds * 1e3 for name, seconds in self._own.items()}
        self._of_step.clear()
        self._own.clear()
        return self.last_step


class PhaseTimer:
    """One phase of ``StepTimers``, with the methods of DeepSpeed's timers. It measures nothing while those are off."""

    def __init__(self, timers: StepTimers, name: str) -> None:
        self._timers = timers
        self._name = name

    def start(self) -> None:
        if self._timers.is_on:
            self._timers.began[self._name] = self._timers.now()

    def stop(self, reset: bool = False, record: bool = True) -> None:
        began = self._timers.began.pop(self._name, None)
        if began is not None:
            if reset:
                self.reset()
            self._timers.add(self._name, self._timers.now() - began)

    def reset(self) -> None:
        self._timers.reset(self._name)

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds since the last reset."""
        milliseconds, _ = self._timers.milliseconds(self._name)
        if reset:
            self.reset()
        return milliseconds

    def mean(self) -> float:
        """Mean milliseconds of one run."""
        milliseconds, count = self._timers.milliseconds(self._name)
        return milliseconds / max(1, count)


class ThroughputTimer:
    """Samples per second between two calls of ``take``."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._samples = 0

    def take(self, samples: int) -> float:
        """Samples per second since the last call. ``samples``: the total so far."""
        now = time.perf_counter()
        rate = (samples - self._samples) / max(now - self._since, 1e-9)
        self._since, self._samples = now, samples
        return rate
