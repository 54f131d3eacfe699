"""Where a step's time goes: forward, backward, step, in milliseconds. Off unless the config asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.device import Device


class StepTimers:
    """Wall-clock time by phase, since the last ``take()``.

    Order: with ``is_on`` the host waits for the device at both ends of a phase; else nothing is measured and nothing
    waits.
    """

    def __init__(self, device: Device, *, is_on: bool) -> None:
        self.is_on = is_on
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        self._device.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._device.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Milliseconds by phase, and start anew."""
        taken = {name: seconds * 1e3 for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class Throughput:
    """Samples per second between two looks."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._samples = 0

    def take(self, samples: int) -> float:
        """Samples per second since the last call; ``samples``: seen in all."""
        now = time.perf_counter()
        rate = (samples - self._samples) / max(now - self._since, 1e-9)
        self._since, self._samples = now, samples
        return rate
