"""``deepspeed.utils.timer``: wall-clock times by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.comm.world import current_world
from shoal.compat.accelerator import get_accelerator
from shoal.device import Device
from shoal.engine.log import logger, say_on_rank_0
from shoal.observe.timers import PhaseTimer, StepTimers

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


class SynchronizedWallClockTimer(StepTimers):
    """A script's own timers, by name; each start and stop waits for the device."""

    def __init__(self) -> None:
        super().__init__(Device(current_world().device), is_on=True)
        self.timers: dict[str, PhaseTimer] = {}

    def __call__(self, name: str) -> PhaseTimer:
        return self.timers.setdefault(name, PhaseTimer(self, name))

    def get_timers(self) -> dict[str, PhaseTimer]:
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times on rank 0, in milliseconds."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        say_on_rank_0(current_world().rank, "time (ms) | " + " | ".join(parts))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """Counts steps and the seconds that they take, from ``start_step`` on.

    ``config.enabled`` switches the timer; with ``config.synchronized`` it waits for the device. The speed is logged at
    each multiple of ``steps_per_output``; None: never.

    Raises: ValueError: ``steps_per_output`` is no whole number above 0.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None and not isinstance(steps_per_output, int):
            raise ValueError(f"steps_per_output must be a positive integer or None, got {steps_per_output!r}")
        if steps_per_output is not None and steps_per_output <= 0:
            raise ValueError(f"steps_per_output must be greater than 0, got {steps_per_output}")
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn if logging_fn is not None else logger.info
        self.initialized = self.started = False
        self.start_time = self.end_time = 0.0
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends; with ``global_step`` a step."""
        if not (self.config.enabled and self.started):
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if self.start_time <= 0:
            return
        self.end_time = self._now()
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            if report_speed and self._is_report_boundary():
                self.logging(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples per second")
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Over the steps that were timed; -inf before the first of them."""
        timed = self.global_step_count - self.start_step
        return timed * self.batch_size / self.total_elapsed_time if self.total_elapsed_time > 0 else -math.inf

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()
