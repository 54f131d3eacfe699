"""``deepspeed.utils.timer``: wall-clock times by name."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.comm.world import current_world
from shoal.compat.deepspeed.accelerator import get_accelerator
from shoal.engine.log import say_on_rank_0

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


class Timer:
    """One name's time, which adds up."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began = 0.0
        self._seconds = 0.0
        self._count = 0

    def start(self) -> None:
        get_accelerator().synchronize()
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = True) -> None:
        get_accelerator().synchronize()
        passed = time.perf_counter() - self._began
        self._seconds = passed if reset else self._seconds + passed
        self._count += int(record)
        self.started_ = False

    def reset(self) -> None:
        self._seconds, self._count, self.started_ = 0.0, 0, False

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far."""
        milliseconds = self._seconds * 1000
        if reset:
            self.reset()
        return milliseconds

    def mean(self) -> float:
        """Milliseconds of one interval."""
        return self._seconds * 1000 / max(1, self._count)


class SynchronizedWallClockTimer:
    """Timers by name; each start and stop waits for the device."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Say the times on rank 0, in milliseconds."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        say_on_rank_0(current_world().rank, "time (ms) | " + " | ".join(parts))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        def start(self) -> None: ...

        def reset(self) -> None: ...

        def stop(self, reset: bool = False, record: bool = True) -> None: ...

        def elapsed(self, reset: bool = True) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Timer]:
        return {}


__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "Timer"]
