"""A clock for what Shoal measures in tests: its times do not depend on the load of the machine."""

from __future__ import annotations

import threading


class FakeClock(threading.local):
    """Stands for the module ``time``; each thread has its own time, which only ``advance`` changes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
