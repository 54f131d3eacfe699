"""``loss_spike``: a step whose loss is far above those before it is logged, skipped, ends the run, or takes it back."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from shoal.config.schema import LossSpikeSection
from shoal.data.loading import Loader
from shoal.engine.accumulation import Accumulation
from shoal.engine.log import logger
from shoal.engine.parts.part import Part
from shoal.errors import NonFiniteError, UsageError

_LEAST = 10  # losses before any is judged
_MOST_SKIPPED = 10  # in a row; then the new level is no spike
_MOST_REWOUND = 3  # times without a step after the last spike's


class LossSpike(Part):
    """Judges the mean loss of each step, which is the same on every rank.

    A spike is a loss above mean + ``factor`` standard deviations of the last ``window`` losses that were none.

    Args:
        rank: rank 0 logs.

    Communicates: with the action "rewind", at a spike, what loading a checkpoint does, and 8 bytes of each rank.
    """

    name = "loss_spike"

    def __init__(self, section: LossSpikeSection, accumulation: Accumulation, rank: int) -> None:
        self._section = section
        self._accumulation = accumulation
        self._rank = rank
        self._losses: deque[float] = deque(maxlen=section.window)
        self._num_skipped = 0  # in a row
        self._engine: Any = None
        self._is_rewinding = False
        self._num_rewound = 0  # times in a row
        self._last_spike = -1  # step

    def prepare(self, engine: Any) -> None:
        self._engine = engine

    def check_data(self) -> None:
        """Raises: UsageError: the action is "rewind", and samples of the engine's loader cannot be left out."""
        loader, config = self._engine.training_dataloader, self._engine.properties.config
        can_skip = isinstance(loader, Loader) and not isinstance(loader.dataset, IterableDataset)
        is_whole = config.data.stateful and config.fault_tolerance.quorum is None
        if self._section.action == "rewind" and not (can_skip and is_whole):
            raise UsageError(
                "loss_spike.action 'rewind' leaves samples out, which needs the engine's own loader, with its position"
                " in checkpoints.",
                where="initialize()",
                do="pass training_data= with a length and indices, or a TokenStream, without a curriculum by measures,"
                " data.stateful: false and fault_tolerance; or choose the action 'skip'.",
                code="data-skip",
            )

    def before_step(self) -> bool:
        """False: the step is skipped. Raises: NonFiniteError: the run is to stop."""
        loss, step = self._accumulation.step_loss, self._accumulation.counters.global_steps
        if loss is None or not math.isfinite(loss):
            return True  # unknown, or the business of precision.nonfinite
        limit = self._limit()
        if loss <= limit:
            self._losses.append(loss)
            self._num_skipped = 0
            if step > self._last_spike:
                self._num_rewound = 0
            return True
        mean = statistics.fmean(self._losses)
        num = len(self._losses)
        what = f"the loss {loss:.4g} is above {limit:.4g}; the mean of the {num} losses before is {mean:.4g}."
        is_rewound = self._section.action == "rewind"
        has_none = is_rewound and self._engine.checkpointing.last is None
        if self._section.action == "stop" or has_none or (is_rewound and self._num_rewound == _MOST_REWOUND):
            why = " No checkpoint was saved to go back to." if has_none else ""
            if is_rewound and not has_none:
                why = f" The run went back to a checkpoint {self._num_rewound} times and got no further."
            raise NonFiniteError(
                what + why,
                where=f"step {step}",
                do="continue from a checkpoint of before, with other data or a lower learning rate; loss_spike.action"
                " 'skip' leaves such steps out. The parameters are as they were before the step.",
                code="loss-spike",
            )
        if is_rewound:
            self._is_rewinding = True
            self._last_spike = max(step, self._last_spike)
            self._num_rewound += 1
            if self._rank == 0:
                logger.warning("step %d: %s The run goes back to the last checkpoint.", step, what)
            return False
        is_skipped = self._section.action == "skip" and self._num_skipped < _MOST_SKIPPED
        self._num_skipped += 1
        if not is_skipped:
            self._losses.append(loss)
        if self._rank == 0:
            logger.log(logging.WARNING, "step %d%s: %s", step, " is skipped" if is_skipped else "", what)
        return not is_skipped

    def after_step(self) -> None:
        if not self._is_rewinding:
            return
        self._is_rewinding = False
        engine, loader = self._engine, self._engine.training_dataloader
        # Ranks of a pipeline that are neither first nor last may have read nothing.
        positions = engine.axes.world.exchange_on_host([loader.position], label="loss spike")
        path, _ = engine.load_checkpoint(*engine.checkpointing.last)
        start, stop = loader.position, int(max(position for (position,) in positions))
        loader.skip(start, stop)
        if self._rank == 0:
            step = self._accumulation.counters.global_steps
            logger.warning("went back to step %d of %s; samples %d to %d are left out.", step, path, start, stop)

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
