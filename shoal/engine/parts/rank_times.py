"""The times of every rank by phase, of one step in ``goodput.rank_times_every``, in the log of ``goodput``.

forward, backward, step    as of ``wall_clock_breakdown``; of pipeline stages ``pipeline`` has them all
gather, reduce             the parts of them in which the rank waits for parameters and for gradients
data                       the rest of the step: the script's own work, such as loading a batch

A rank's own work is forward and backward without the phases inside them, and data. A rank whose own work takes longer
than that of the others, of its pipeline stage where there are several, is named in the log; so is a stage.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.config.schema import GoodputSection
from shoal.data.loading import Loader
from shoal.engine.accumulation import Counters
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.engine.settings import Properties
from shoal.observe.goodput import GoodputLog, RankTimesRow
from shoal.observe.timers import PHASES, StepTimers
from shoal.text import listed

_OWN = {"forward": "own forward", "backward": "own backward"}
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
        self._num: dict[object, int] = defaultdict(int)  # steps in a row that speak against what is said of a rank
        self._named: set[object] = set()

    def judge(self, row: RankTimesRow) -> Iterator[str]:
        """What is to be said after another measured step."""
        for each in row.compared():
            key = each.ranks, each.stage
            is_slow, is_named = each.factor > self._factor, key in self._named
            self._num[key] = self._num[key] + 1 if is_slow != is_named else 0
            if self._num[key] < self._num_in_row:
                continue
            self._num[key] = 0
            self._named ^= {key}
            who = f"rank {each.ranks[0]} on {self._hosts[each.ranks[0]]}"
            others, do = "other ranks", "Look"
            if each.stage is not None:
                who = f"pipeline stage {each.stage} ({listed(f'rank {r} on {self._hosts[r]}' for r in each.ranks)})"
                others, do = "other stages", "The schedule expects all alike: change pipeline.partition, or look"
            if is_named:
                yield (
                    f"{who} is no longer slow: its work takes {each.total:.1f} ms of a step, the median is"
                    f" {each.usual_total:.1f} ms."
                )
                continue
            phase = max(each.own, key=lambda name: each.own[name] - each.usual[name])
            yield (
                f"{who} is slow, in {self._num_in_row} measured steps in a row: {phase} takes {each.own[phase]:.1f} ms"
                f" of a step, the median of the {others} is {each.usual[phase]:.1f} ms; they wait"
                f" {each.total - each.usual_total:.1f} ms of each step for it. {do} for other programs, heat, or a slow"
                " disk or GPU there."
            )


class RankTimes(Part):
    """Turns the timers on for the steps that are measured, and names slow ranks on rank 0.

    Args:
        hosts: by rank.

    Communicates: an exchange of 72 bytes of each rank after a step that was measured.
    Order: in such a step the host waits for the device at both ends of each phase.
    """

    def __init__(self, properties: Properties, counters: Counters, hosts: Sequence[str]) -> None:
        self._properties = properties
        self._counters = counters
        section: GoodputSection = properties.config.goodput
        self._every = section.rank_times_every
        self._slow_ranks = SlowRanks(hosts, section.slow_rank_factor, section.slow_rank_samples)
        self._timers: StepTimers
        self._is_always_on = False
        self._began: float | None = None

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        self._timers = engine.timers
        self._is_always_on = engine.timers.is_on
        engine.sharded.reducer.timed = engine.timers.phase
        self._begin(self._counters.global_steps + 1)

    def after_step(self) -> None:
        step = self._counters.global_steps
        if self._began is not None:
            seconds = time.perf_counter() - self._began
            self._exchange(step, 1e3 * seconds)
        self._begin(step + 1)

    def _begin(self, step: int) -> None:
        is_measured = step % self._every == _FIRST % self._every
        self._timers.is_on = self._is_always_on or is_measured
        self._timers.is_for_ranks = is_measured and not self._is_always_on
        self._began = time.perf_counter() if is_measured else None

    def _exchange(self, step: int, milliseconds: float) -> None:
        phases, own = self._timers.last_step, self._timers.last_own
        whole = ("pipeline",) if "pipeline" in phases else ("forward", "backward", "step")
        data = milliseconds - sum(phases.get(name, 0.0) for name in whole)
        mine = [*(phases.get(name, 0.0) for name in PHASES), max(data, 0.0), *(own.get(name, 0.0) for name in _OWN)]
        exchanged = self._properties.axes.world.exchange_on_host(mine, label="rank times")
        columns = dict(zip((*PHASES, "data", *_OWN.values()), zip(*exchanged, strict=True), strict=True))
        of_own = {name: columns.pop(column) for name, column in _OWN.items()} | {"data": columns["data"]}
        mesh = self._properties.axes.mesh
        row = RankTimesRow(step, columns, of_own, [mesh.index("pp", rank) for rank in range(len(exchanged))])
        log = self._properties.world.heartbeat.log
        if isinstance(log, GoodputLog):
            log.write_ranks(row)
            if isinstance(loader := self._engine.training_dataloader, Loader):
                log.write_sources(step, loader.source_seconds)
        if self._properties.rank == 0:
            for text in self._slow_ranks.judge(row):
                logger.warning("step %d: %s", step, text)
