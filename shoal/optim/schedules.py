"""Learning rate schedules with DeepSpeed's names, parameters and values, as objects that are stepped once per
optimizer step.

    i        -1 at construction, then one more with each step()
    WarmupLR          min + (max - min) * warmup(i), then max
    WarmupDecayLR     the same, then linearly to 0 at total_num_steps
    WarmupCosineLR    the optimizer's own rate * ratio: warm up, then half a cosine down to cos_min_ratio
    OneCycle          up, down, then decay; momentum the other way
    LRRangeTest       min * (1 + step_rate * (i + 1) / step_size), smooth or in stairs

    warmup(i) = ln(i + 1) / ln(n) ("log"), i / n ("linear"), with n = max(2, warmup_num_steps), for i < n; before the
    first step 0

With the default "log" the first update runs at the minimum, usually 0; ``warmup_num_steps`` of 2 gives 0, max, max.
Each value depends on ``i`` alone, so the state is one number, and loading it sets the optimizer's rates at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from shoal.comm.environment import warn_on_rank_0
from shoal.config.optimizer import torch_schedules
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


WarmupType = Literal["log", "linear"]
DEFAULT_BETA2 = 0.99  # OneCycle sets the second beta to this, as DeepSpeed does, whatever the optimizer's was


class WarmupLR(Schedule):
    """Warm up from ``warmup_min_lr`` to ``warmup_max_lr``, then stay at the maximum.

    Args:
        warmup_min_lr, warmup_max_lr: one number, or one for each group. The maximum's default is each group's own rate.
        warmup_num_steps: at least 2; less, also 0 and below, counts as 2.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._check(_warmup_problems(warmup_num_steps, warmup_type))
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.warmup_type: WarmupType = warmup_type
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        if self.last_batch_iteration < self.warmup_num_steps:
            part = _warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        else:
            part = self._after_warmup()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm up as ``WarmupLR``, then go down linearly, to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(type(self).__name__, total_num_steps, self.warmup_num_steps)

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Warm up from ``warmup_min_ratio`` to 1 times each group's own rate, then half a cosine down to
    ``cos_min_ratio`` times.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._check(_warmup_problems(warmup_num_steps, warmup_type))
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type: WarmupType = warmup_type
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        _warn_if_short(type(self).__name__, total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._apply()

    def get_lr_ratio(self) -> float:
        """The factor of the groups' own rates; 0 before the first step."""
        now = self.last_batch_iteration
        if now < 0:
            return 0.0
        if now < self.warmup_num_steps:
            part = _warmup(now, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * part
        done = min(1.0, (now - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(Schedule):
    """A rate that grows steadily, to find the largest at which training still converges.

    Source: Smith, A disciplined approach to neural network hyper-parameters, section 4 (arXiv:1803.09820).
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        if not lr_range_test_step_size > 0:
            self._check([f"lr_range_test_step_size is {lr_range_test_step_size}, expected at least 1"])
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        interval: float = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(Schedule):
    """One cycle of the rate up and down, with momentum down and up, then decay.

    Args:
        cycle_second_step_size: default: as the first.
        cycle_first_stair_count, cycle_second_stair_count: stairs in each half in place of a smooth line; 0: smooth.
            Second: as the first.
        decay_lr_rate, decay_mom_rate: after the cycle the rate is ``min / (1 + rate k)`` and the momentum ``max (1 +
            rate k)``, k growing by one every ``decay_step_size`` steps. 0: no decay.
        cycle_momentum: cycle the first beta of groups that have ``betas`` (their second becomes 0.99, as in
            DeepSpeed), and the ``momentum`` of groups where it is not zero (which DeepSpeed leaves alone).

    Source: Smith, A disciplined approach to neural network hyper-parameters, section 4 (arXiv:1803.09820).
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = cycle_first_step_size
        second = first if cycle_second_step_size is None else cycle_second_step_size
        problems = []
        if not first > 0:
            problems.append(f"cycle_first_step_size is {first}, expected at least 1")
        if not second >= 0:
            problems.append(f"cycle_second_step_size is {second}, expected 0 or above")
        self._check(problems)
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and any(map(_momentum_key, self.optimizer.param_groups))
        if cycle_momentum and not self.cycle_momentum:
            warn_on_rank_0(
                f"OneCycle: {type(self.optimizer).__name__} has neither betas nor a momentum, so only its rate is "
                "cycled. Set cycle_momentum to false to say so."
            )
        if last_batch_iteration == -1:
            self._apply()
            self._last_lr = None  # as DeepSpeed: a rate is known from the first step on
            if self.cycle_momentum:
                self._set_momentum(self.min_moms)

    def _height(self) -> float:
        """The position in the cycle, from 0 (minimum rate) to 1 (maximum rate)."""
        position = (self.last_batch_iteration + 1) % self.total_size
        if position <= self.first_step_size:
            height, stairs = position / self.first_step_size, self.first_stair_count
        else:
            height, stairs = (self.total_size - position) / self.second_step_size, self.second_stair_count
        if stairs <= 0:
            return height
        # Multiply before dividing: rounding must not push a whole stair down.
        if position <= self.first_step_size:
            return math.floor(position * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - position) * stairs / self.second_step_size) / stairs

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration >= self.total_size:
            return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[Any] | None:
        """Each group's ``betas``, or its momentum where it has none; None where momentum is not cycled."""
        momenta = self._momenta()
        if momenta is None:
            return None
        groups = self.optimizer.param_groups
        return [
            (momentum, DEFAULT_BETA2) if _momentum_key(group) == "betas" else momentum
            for group, momentum in zip(groups, momenta, strict=True)
        ]

    def _momenta(self) -> list[float] | None:
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration >= self.total_size:
            return [high * self._decay(self.decay_mom_rate) for high in self.max_moms]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)

    def _apply(self) -> None:
        super()._apply()
        momenta = self._momenta()
        if momenta is not None:
            self._set_momentum(momenta)

    def _set_momentum(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            key = _momentum_key(group)
            if key == "betas":
                group["betas"] = (momentum, DEFAULT_BETA2)
            elif key == "momentum":
                group["momentum"] = momentum


def _momentum_key(group: Mapping[str, Any]) -> str | None:
    if group.get("use_muon"):
        return "momentum"
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None


def _warmup(iteration: int, num_steps: int, kind: WarmupType) -> float:
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


def _warmup_problems(num_steps: Any, kind: Any) -> list[str]:
    problems = []
    if isinstance(num_steps, bool) or not isinstance(num_steps, int | float) or num_steps != int(num_steps):
        problems.append(f"warmup_num_steps is {num_steps!r}, expected a whole number")
    if kind not in ("log", "linear"):
        problems.append(f"warmup_type is {kind!r}, expected 'log' or 'linear'")
    return problems


def _warn_if_short(name: str, total: int, warmup: int) -> None:
    if total < warmup:
        warn_on_rank_0(
            f"{name}: total_num_steps {total} is less than warmup_num_steps {warmup}: no steps are left for the decay."
        )


_OWN: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_OWN)


def build_schedule(name: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Build the schedule that a configuration names: one of the five here, or a class of ``torch.optim.lr_scheduler``,
    in any case. Loading the configuration has checked the name and the parameters.

    Raises: OptimizerError: an unknown name, or parameters that the constructor refuses.
    """
    factories: dict[str, Any] = {**torch_schedules(), **_OWN}
    canonical = next((key for key in factories if key.lower() == name.lower().replace("_", "")), None)
    if canonical is None:
        raise OptimizerError(f"there is no schedule {name!r}.", where="scheduler.type", code="schedule-name")
    try:
        return factories[canonical](torch_optimizer(optimizer), **params)
    except (TypeError, ValueError, ZeroDivisionError, KeyError) as problem:
        if isinstance(problem, OptimizerError):
            raise
        where = f"scheduler.params of {canonical!r}"
        raise OptimizerError(f"{type(problem).__name__}: {problem}", where=where, code="schedule-params") from problem
