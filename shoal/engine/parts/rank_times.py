"""The times of every rank by phase, of one step in ``goodput.rank_times_every``, in the log of ``goodput``.

forward, backward, step    as of ``wall_clock_breakdown``; of pipeline stages ``pipeline`` has them all
gather, reduce             the parts of them in which the rank waits for parameters and for gradients
data                       the rest of the step: the script's own work, such as loading a batch
"""

from __future__ import annotations

import time
from typing import Any

from shoal.engine.accumulation import Counters
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.observe.goodput import GoodputLog
from shoal.observe.timers import PHASES, StepTimers

_FIRST = 3  # step that is measured, if ``every`` is not below it: the first ones learn, and round numbers save


class RankTimes(Part):
    """Turns the timers on for the steps that are measured. Args: ``every``: steps from one to the next.

    Communicates: an exchange of 56 bytes of each rank after a step that was measured.
    Order: in such a step the host waits for the device at both ends of each phase.
    """

    def __init__(self, properties: Properties, counters: Counters, every: int) -> None:
        self._properties = properties
        self._counters = counters
        self._every = every
        self._timers: StepTimers
        self._is_always_on = False
        self._began: float | None = None

    def prepare(self, engine: Any) -> None:
        self._timers = engine.timers
        self._is_always_on = engine.timers.is_on
        engine.sharded.reducer.timed = engine.timers.phase
        self._begin(self._counters.global_steps + 1)

    def after_step(self) -> None:
        step = self._counters.global_steps
        if self._began is not None:
            seconds = time.perf_counter() - self._began
            self._exchange(step, 1e3 * seconds, self._timers.last_step)
        self._begin(step + 1)

    def _begin(self, step: int) -> None:
        is_measured = step % self._every == _FIRST % self._every
        self._timers.is_on = self._is_always_on or is_measured
        self._timers.is_for_ranks = is_measured and not self._is_always_on
        self._began = time.perf_counter() if is_measured else None

    def _exchange(self, step: int, milliseconds: float, phases: dict[str, float]) -> None:
        whole = ("pipeline",) if "pipeline" in phases else ("forward", "backward", "step")
        data = milliseconds - sum(phases.get(name, 0.0) for name in whole)
        mine = [phases.get(name, 0.0) for name in PHASES] + [max(data, 0.0)]
        columns = zip(*self._properties.axes.world.exchange_on_host(mine, label="rank times"), strict=True)
        log = self._properties.world.heartbeat.log
        if isinstance(log, GoodputLog):
            log.write_ranks(step, dict(zip((*PHASES, "data"), columns, strict=True)))
