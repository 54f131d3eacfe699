"""Curriculum learning: how difficult the samples of a step may be, easy ones first; with ``seqlen``, how long.

fixed_linear    grows by the same amount each step, in multiples of ``difficulty_step``
fixed_root      fast at first: the root of ``root_degree`` of the part done
fixed_discrete  given difficulties, each until its ``max_step``
custom          the script's function of the step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.config.schedule import schedule_problems
from shoal.errors import AssertedUsageError, UsageError


class CurriculumScheduler:
    """The schedule and its current difficulty, with DeepSpeed's names.

    >>> linear = {"total_curriculum_step": 8, "difficulty_step": 2}
    >>> config = {"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear", "schedule_config": linear}
    >>> scheduler = CurriculumScheduler(config)
    >>> [scheduler.update_difficulty(step) for step in range(1, 10)]
    [2, 4, 4, 6, 6, 8, 8, 10, 10]

    Args:
        config: ``min_difficulty``, ``max_difficulty``, ``schedule_type``, ``schedule_config``.

    Raises: AssertedUsageError: a key is missing or makes no schedule.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key, what, do in schedule_problems(config):
            raise AssertedUsageError(f"{key}: {what}", where="CurriculumScheduler", do=do, code="curriculum-schedule")
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": config["schedule_type"],
            "schedule_config": dict(config.get("schedule_config") or {}),
        }
        self.first_step = True  # DeepSpeed's; nothing here reads it
        self._custom: Callable[[int], int] | None = None

    def get_current_difficulty(self) -> int:
        """The current difficulty."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the current difficulty."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """The function of a ``custom`` schedule: from a step, counted from 1, to a difficulty."""
        self._custom = schedule_function

    def get_state(self) -> dict[str, Any]:
        """The schedule's keys and ``current_difficulty``."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of ``get_state``."""
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty of a step, counted from 1.

        Raises: UsageError: the schedule is ``custom``, and no function was set.
        """
        kind, how = self.state["schedule_type"], self.state["schedule_config"]
        if kind == "custom":
            if self._custom is None:
                raise UsageError(
                    'the curriculum\'s schedule_type is "custom", and no function was set.',
                    do="call engine.set_custom_curriculum_learning_schedule({'seqlen': function}) before training.",
                    code="curriculum-custom",
                )
            return self._custom(global_steps)
        if kind == "fixed_discrete":
            levels = zip(how["max_step"], how["difficulty"], strict=False)
            return int(next((level for end, level in levels if global_steps <= end), how["difficulty"][-1]))
        return self._grown(global_steps, how["root_degree"] if kind == "fixed_root" else 1)

    def _grown(self, step: int, root_degree: int) -> int:
        low, high, how = self.state["min_difficulty"], self.state["max_difficulty"], self.state["schedule_config"]
        part = (step / how["total_curriculum_step"]) ** (1.0 / root_degree)
        multiple = how["difficulty_step"]
        grown = math.floor(part * (high - low) + low) // multiple * multiple
        first = -(-low // multiple) * multiple  # the least multiple from ``low`` on
        return int(min(max(grown, first), high))

    def update_difficulty(self, global_steps: int) -> int:
        """Go to a step, counted from 1, unless ``max_difficulty`` is reached. Returns: the difficulty."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()
