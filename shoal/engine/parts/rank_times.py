"""The times of every rank by phase, of one step in ``goodput.rank_times_every``, in the log of ``goodput``.

forward, backward, step    as of ``wall_clock_breakdown``; of pipeline stages ``pipeline`` has them all
gather, reduce             the parts of them in which the rank waits for parameters and for gradients
data                       the rest of the step: the script's own work, such as loading a batch

A rank whose forward, backward and data, without its waits, take longer than those of the others is named in the log.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from shoal.config.schema import GoodputSection
from shoal.data.loading import Loader
from shoal.engine.accumulation import Counters
from shoal.engine.log import logger
from shoal.engine.parts.part import ForwardInputs, Part
from shoal.engine.settings import Properties
from shoal.observe.goodput import GoodputLog
from shoal.observe.timers import PHASES, StepTimers

_FIRST = 3  # step that is measured, if ``every`` is not below it: the first ones learn, and round numbers save


class SlowRanks:
    """The ranks that are slow in several measured steps in a row.

    Args:
        hosts: by rank.
        factor: a rank is slow if its own work takes longer than so many times the median of the others.
        num_in_row: measured steps after which it is named, and after which it is no longer slow.
    """

    def __init__(self, hosts: Sequence[str], factor: float, num_in_row: int) -> None:
        self._hosts = hosts
        self._factor = factor
        self._num_in_row = num_in_row
        self._num: dict[int, int] = defaultdict(int)  # steps in a row that speak against what is said of a rank
        self._named: set[int] = set()

    def judge(self, own: Mapping[str, Sequence[float]]) -> Iterator[str]:
        """What is to be said after another measured step.

        Args:
            own: milliseconds of a rank's own work, by phase and rank.
        """
        whole = [sum(of_rank) for of_rank in zip(*own.values(), strict=True)]
        for rank, mine in enumerate(whole) if len(whole) > 1 else ():
            others = {phase: median([*times[:rank], *times[rank + 1 :]]) for phase, times in own.items()}
            usual = median([*whole[:rank], *whole[rank + 1 :]])
            is_slow, is_named = mine > self._factor * usual, rank in self._named
            self._num[rank] = self._num[rank] + 1 if is_slow != is_named else 0
            if self._num[rank] < self._num_in_row:
                continue
            self._num[rank] = 0
            self._named ^= {rank}
            who = f"rank {rank} on {self._hosts[rank]}"
            if is_named:
                yield f"{who} is no longer slow: its work takes {mine:.1f} ms of a step, the median is {usual:.1f} ms."
                continue
            phase = max(own, key=lambda name: own[name][rank] - others[name])
            yield (
                f"{who} is slow, in {self._num_in_row} measured steps in a row: {phase} takes {own[phase][rank]:.1f} ms"
                f" of a step, the median of the other ranks is {others[phase]:.1f} ms; they wait {mine - usual:.1f} ms"
                " of each step for it. Look for other programs, heat, or a slow disk or GPU there."
            )


class RankTimes(Part):
    """Turns the timers on for the steps that are measured, and names slow ranks on rank 0.

    Args:
        hosts: by rank.

    Communicates: an exchange of 64 bytes of each rank after a step that was measured.
    Order: in such a step the host waits for the device at both ends of each phase.
    """

    def __init__(self, properties: Properties, counters: Counters, hosts: Sequence[str]) -> None:
        self._properties = properties
        self._counters = counters
        section: GoodputSection = properties.config.goodput
        self._every = section.rank_times_every
        self._slow_ranks = SlowRanks(hosts, section.slow_rank_factor, section.slow_rank_samples)
        self._gathered = self._in_forward = 0.0  # milliseconds of gather, before this forward pass, and in all of them
        self._timers: StepTimers
        self._is_always_on = False
        self._began: float | None = None

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        self._timers = engine.timers
        self._is_always_on = engine.timers.is_on
        engine.sharded.reducer.timed = engine.timers.phase
        self._begin(self._counters.global_steps + 1)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs | None:
        self._gathered, _ = self._timers.milliseconds("gather")
        return None

    def after_forward(self, output: Any) -> None:
        self._in_forward += self._timers.milliseconds("gather")[0] - self._gathered

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
        self._in_forward = 0.0
        self._began = time.perf_counter() if is_measured else None

    def _exchange(self, step: int, milliseconds: float, phases: dict[str, float]) -> None:
        whole = ("pipeline",) if "pipeline" in phases else ("forward", "backward", "step")
        data = milliseconds - sum(phases.get(name, 0.0) for name in whole)
        mine = [*(phases.get(name, 0.0) for name in PHASES), max(data, 0.0), self._in_forward]
        exchanged = zip(*self._properties.axes.world.exchange_on_host(mine, label="rank times"), strict=True)
        *columns, in_forward = exchanged
        times = dict(zip((*PHASES, "data"), columns, strict=True))
        log = self._properties.world.heartbeat.log
        if isinstance(log, GoodputLog):
            log.write_ranks(step, times)
            if isinstance(loader := self._engine.training_dataloader, Loader):
                log.write_sources(step, loader.source_seconds)
        if self._properties.rank == 0 and "pipeline" not in phases:  # stages differ, and wait for each other in it
            own = {
                "forward": [a - b for a, b in zip(times["forward"], in_forward, strict=True)],
                "backward": [
                    a - (b - c) - d
                    for a, b, c, d in zip(times["backward"], times["gather"], in_forward, times["reduce"], strict=True)
                ],
                "data": times["data"],
            }
            for text in self._slow_ranks.judge(own):
                logger.warning("step %d: %s", step, text)
