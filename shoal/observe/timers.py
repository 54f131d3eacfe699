"""Milliseconds of a step's phases: forward, backward, step. Off unless the config enables it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.device import Device

# DeepSpeed's names of the phases.
_PHASES = {
    "fwd": "forward",
    "fwd_microstep": "forward",
    "bwd": "backward",
    "bwd_microstep": "backward",
    "step_microstep": "step",
}


class StepTimers:
    """Wall-clock time by phase, since the last ``take()``.

    Order: with ``is_on`` the host waits for the device at both ends of a phase; else nothing is measured.
    """

    def __init__(self, device: Device, *, is_on: bool) -> None:
        self.is_on = is_on
        self._device = device
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.began: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        start = self.now()
        try:
            yield
        finally:
            self.add(name, self.now() - start)

    def __call__(self, name: str) -> PhaseTimer:
        """One phase's timer (``forward``, ``backward``, ``step``, or DeepSpeed's ``fwd``, ``bwd``), or one of the
        script's own, by any other name.
        """
        return PhaseTimer(self, _PHASES.get(name, name))

    def now(self) -> float:
        """Wait for the device. Returns: the time in seconds."""
        self._device.synchronize()
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._counts[name] = self._counts.get(name, 0) + 1

    def milliseconds(self, name: str) -> tuple[float, int]:
        """A phase's milliseconds so far, and how often it ran."""
        return self._seconds.get(name, 0.0) * 1e3, self._counts.get(name, 0)

    def reset(self, name: str) -> None:
        self._seconds.pop(name, None)
        self._counts.pop(name, None)

    def take(self) -> dict[str, float]:
        """Milliseconds by phase; resets them."""
        taken = {name: seconds * 1e3 for name, seconds in self._seconds.items()}
        self._seconds.clear()
        self._counts.clear()
        return taken


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
        """Milliseconds so far, since the last line of ``steps_per_print`` or the last reset."""
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
