"""Steps the learning-rate schedule, and warns about a script that steps it too."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("shoal")


class ScheduleWatch:
    """Steps one schedule once for each applied step."""

    def __init__(self) -> None:
        self._place: Any = None  # the schedule's own count after the engine's last step of it
        self._num_moved = 0  # steps in a row before which the script had stepped it
        self._has_warned = False

    def step(self, schedule: Any, arguments: dict[str, Any], rank: int) -> None:
        """Step it. Warns once, on rank 0, where the script stepped it between two steps, twice in a row.

        Args:
            arguments: of the schedule's own ``step``.
        """
        place = _place_of(schedule)
        # A single change may be a loaded checkpoint.
        self._num_moved = self._num_moved + 1 if self._place is not None and place != self._place else 0
        if self._num_moved == 2 and not self._has_warned and rank == 0:
            self._has_warned = True
            logger.warning(
                "the script calls step() of the learning-rate schedule (%s), and engine.step() does so too: it runs"
                " twice as fast. Leave the call out, or do not hand the schedule to initialize().",
                type(schedule).__name__,
            )
        schedule.step(**arguments)
        self._place = _place_of(schedule)


def _place_of(schedule: Any) -> Any:
    """How often it was stepped, under torch's or DeepSpeed's name; None: it has neither."""
    return getattr(schedule, "last_epoch", getattr(schedule, "last_batch_iteration", None))
