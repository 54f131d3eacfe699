"""The base of all schedules: it sets the rates of the optimizer's groups, and its state is one number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.errors import OptimizerError, UsageError


class NotSteppedError(UsageError, AssertionError):
    """A schedule was asked for its last rate before it had one. Also an AssertionError, which Transformers expects."""

    code = "schedule-not-stepped"


class Schedule(ABC):
    """The base of all schedules.

    ``optimizer`` is a torch optimizer, or an object that has one as its ``optimizer``. Its groups' ``lr`` is set at
    construction, when ``last_batch_iteration`` is -1, and by every ``step()``.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group at the present iteration."""

    def get_last_lr(self) -> list[float]:
        """The rates that were set last.

        Raises: NotSteppedError: the schedule was constructed to resume at an iteration, and has not been stepped.
        """
        if self._last_lr is None:
            raise NotSteppedError(
                f"{type(self).__name__} has set no rate yet: need to call step() first.", do="call step() first."
            )
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to ``last_batch_iteration``, and set the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, Shoal's or DeepSpeed's, and set the optimizer's rates to those of its iteration."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            _set(group, "lr", rate)
        self._last_lr = rates

    def _per_group(self, value: Any, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            value = [value] * groups
        if len(value) != groups:
            raise OptimizerError(
                f"{name} has {len(value)} values, but the optimizer has {groups} parameter groups.",
                where=type(self).__name__,
                do="give one number, or one for each group.",
                code="schedule-params",
            )
        return [float(one) for one in value]

    def _check(self, problems: Sequence[str]) -> None:
        if problems:
            raise OptimizerError("; ".join(problems) + ".", where=type(self).__name__, code="schedule-params")


def _set(group: dict[str, Any], key: str, value: float) -> None:
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)  # a captured graph or fused kernel reads this tensor, so it is modified in place
    else:
        group[key] = value


class ScheduleOptimizerError(OptimizerError, TypeError):
    """What a schedule was given is no optimizer. DeepSpeed's and torch's raise a TypeError, so it is one too."""


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise ScheduleOptimizerError(
        f"a schedule needs a torch.optim.Optimizer, got {type(optimizer).__name__}.",
        do="pass the optimizer, or what initialize() returned for it.",
        code="schedule-optimizer",
    )
