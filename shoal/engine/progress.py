"""What rank 0 reports after a step: the line of ``steps_per_print``, timers, monitors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.config import Config
from shoal.engine.accumulation import Counters
from shoal.engine.log import logger
from shoal.observe.monitor import Event, Monitor
from shoal.observe.timers import StepTimers, ThroughputTimer
from shoal.parallel.recompute import Recompute
from shoal.parallel.segment import as_table
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
        speaks: rank 0, but in a dry run, whose losses have no values and whose times are this machine's.
        monitor: gets learning rate, loss, loss scale and times by samples seen; or None.
        recompute: whose times by segment are logged.
    """

    def __init__(
        self, config: Config, speaks: bool, timers: StepTimers, monitor: Monitor | None, recompute: Recompute
    ) -> None:
        every = config.steps_per_print
        self._every = int(every) if every is not None and math.isfinite(every) and every > 0 else None
        self._speaks = speaks
        self._timers = timers
        self._times: Counter[str] = Counter()  # milliseconds since the last line
        self._num_steps = 0  # since then
        self._throughput = ThroughputTimer()
        self._recompute = recompute
        self.monitor = monitor

    def after_step(self, counters: Counters, step: StepNumbers) -> None:
        """Rank 0 logs and writes; the other ranks do nothing. Reads no tensor.

        Without ``steps_per_print`` times and memory are logged after each step.
        """
        times = self._timers.end_step()
        times = {} if self._timers.is_for_ranks else times
        if not self._speaks:
            return
        self._times.update(times)
        self._num_steps += 1
        if self.monitor is not None:
            self.monitor.write_events(_events(counters.global_samples, step, times))
        if counters.global_steps % (self._every or 1):
            return
        words = [] if self._every is None else self._numbers(counters, step)
        if self._times:
            times = {name: ms for name, ms in self._times.items() if name != "gather"}
            means = {name: f"{name} {ms / self._num_steps:.1f} ms" for name, ms in times.items()}
            if "backward" in means and "reduce" in means:
                means["backward"] += f" (with {means.pop('reduce')})"
            words.append(", ".join(means.values()))
        if self._timers.memory:
            readings = self._timers.memory
            after = ", ".join(f"{name} {format_bytes(each.allocated)}" for name, each in readings.items())
            words.append(f"memory after {after}, peak {format_bytes(max(each.peak for each in readings.values()))}")
        self._times.clear()
        self._num_steps = 0
        if words:
            logger.info(", ".join([f"step {counters.global_steps}", *words]))
        segments = self._recompute.times.take()
        if segments:
            logger.info("recomputed segments\n%s", as_table(segments))

    def _numbers(self, counters: Counters, step: StepNumbers) -> list[str]:
        words = [] if step.loss is None else [f"loss {step.loss:.4f}"]
        words.append(f"lr {', '.join(f'{rate:.3g}' for rate in step.rates)}")
        if step.norm is not None:
            words.append(f"gradient norm {step.norm:.4g}")
        if counters.skipped_steps:
            words.append(f"skipped {counters.skipped_steps}")
        return [*words, f"{self._throughput.take(counters.global_samples):.4g} samples/s"]


def _events(samples: int, step: StepNumbers, times: Mapping[str, float]) -> list[Event]:
    """A step's numbers under DeepSpeed's names."""
    values: dict[str, float] = {}
    if step.rates:
        values["lr"] = step.rates[0]
    if step.loss is not None:
        values["train_loss"] = step.loss
    if step.loss_scale != 1.0:
        values["loss_scale"] = step.loss_scale
    phases = {f"elapsed_time_ms_{name}": times[name] for name in ("forward", "backward", "step") if name in times}
    if "backward" in times:
        reduced = times.get("reduce", 0.0)
        phases["elapsed_time_ms_backward_inner"] = max(0.0, times["backward"] - reduced)
        phases["elapsed_time_ms_backward_allreduce"] = reduced
    return [(f"Train/Samples/{name}", value, samples) for name, value in {**values, **phases}.items()]
