"""What rank 0 reports after a step: the line of ``steps_per_print``, timers, monitors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.config import Config
from shoal.engine.accumulation import Counters
from shoal.engine.log import logger
from shoal.observe.ledger import Ledger
from shoal.observe.monitor import Monitor
from shoal.observe.timers import StepTimers, ThroughputTimer
from shoal.parallel.recompute import Recompute
from shoal.parallel.segment_times import as_table
from shoal.text import format_bytes


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step."""

    rates: Sequence[float]
    loss: float | None  # the mean over this rank's micro-batches
    norm: float | None
    loss_scale: float


class Progress:
    """Called after each step. Reports nothing unless the config asks for it.

    Args:
        monitor: gets learning rate, loss and loss scale by samples seen; or None.
        recompute: whose times by segment are logged.
    """

    def __init__(
        self, config: Config, rank: int, timers: StepTimers, monitor: Monitor | None, recompute: Recompute
    ) -> None:
        every = config.steps_per_print
        self._every = int(every) if every is not None and math.isfinite(every) and every > 0 else None
        self._shows_memory = bool(config.memory_breakdown)
        self._rank = rank
        self._timers = timers
        self._throughput = ThroughputTimer()
        self._recompute = recompute
        self.monitor = monitor

    def after_step(self, counters: Counters, step: StepNumbers, memory: Callable[[], Ledger]) -> None:
        """Rank 0 logs and writes; the other ranks do nothing. Reads no tensor."""
        if self._rank != 0:
            return
        if self.monitor is not None:
            events = [("Train/Samples/lr", step.rates[0], counters.global_samples)] if step.rates else []
            if step.loss is not None:
                events.append(("Train/Samples/train_loss", step.loss, counters.global_samples))
            if step.loss_scale != 1.0:
                events.append(("Train/Samples/loss_scale", step.loss_scale, counters.global_samples))
            self.monitor.write_events(events)
        if self._every is None or counters.global_steps % self._every:
            return
        words = [f"step {counters.global_steps}"]
        if step.loss is not None:
            words.append(f"loss {step.loss:.4f}")
        words.append(f"lr {', '.join(f'{rate:.3g}' for rate in step.rates)}")
        if step.norm is not None:
            words.append(f"gradient norm {step.norm:.4g}")
        if counters.skipped_steps:
            words.append(f"skipped {counters.skipped_steps}")
        words.append(f"{self._throughput.take(counters.global_samples):.4g} samples/s")
        phases = self._timers.take()
        if phases:
            words.append(" ".join(f"{name} {ms / self._every:.1f} ms" for name, ms in phases.items()))
        if self._shows_memory:
            words.append(f"memory {format_bytes(memory().reading.allocated)}")
        logger.info(", ".join(words))
        times = self._recompute.times.take()
        if times:
            logger.info("recomputed segments\n%s", as_table(times))
