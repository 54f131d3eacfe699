"""``loss_spike``: a step whose loss is far above those before it is logged, skipped, or ends the run."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from shoal.config.schema import LossSpikeSection
from shoal.engine.accumulation import Accumulation
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.errors import NonFiniteError

_LEAST = 10  # losses before any is judged
_MOST_SKIPPED = 10  # in a row; then the new level is no spike


class LossSpike(Part):
    """Judges the mean loss of each step, which is the same on every rank.

    A spike is a loss above mean + ``factor`` standard deviations of the last ``window`` losses that were none.

    Args:
        rank: rank 0 logs.
    """

    name = "loss_spike"

    def __init__(self, section: LossSpikeSection, accumulation: Accumulation, rank: int) -> None:
        self._section = section
        self._accumulation = accumulation
        self._rank = rank
        self._losses: deque[float] = deque(maxlen=section.window)
        self._num_skipped = 0  # in a row

    def before_step(self) -> bool:
        """False: the step is skipped. Raises: NonFiniteError: the run is to stop."""
        loss, step = self._accumulation.step_loss, self._accumulation.counters.global_steps
        if loss is None or not math.isfinite(loss):
            return True  # unknown, or the business of precision.nonfinite
        limit = self._limit()
        if loss <= limit:
            self._losses.append(loss)
            self._num_skipped = 0
            return True
        mean = statistics.fmean(self._losses)
        num = len(self._losses)
        what = f"the loss {loss:.4g} is above {limit:.4g}; the mean of the {num} losses before is {mean:.4g}."
        if self._section.action == "stop":
            raise NonFiniteError(
                what,
                where=f"step {step}",
                do="continue from a checkpoint of before, with other data or a lower learning rate; loss_spike.action"
                " 'skip' leaves such steps out. The parameters are as they were before the step.",
                code="loss-spike",
            )
        is_skipped = self._section.action == "skip" and self._num_skipped < _MOST_SKIPPED
        self._num_skipped += 1
        if not is_skipped:
            self._losses.append(loss)
        if self._rank == 0:
            logger.log(logging.WARNING, "step %d%s: %s", step, " is skipped" if is_skipped else "", what)
        return not is_skipped

    def _limit(self) -> float:
        if len(self._losses) < min(_LEAST, self._section.window):
            return math.inf
        return statistics.fmean(self._losses) + self._section.factor * statistics.stdev(self._losses)

    def state(self) -> Mapping[str, Any]:
        return {"losses": list(self._losses), "skipped": self._num_skipped}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(saved["losses"])
        self._num_skipped = int(saved["skipped"])
