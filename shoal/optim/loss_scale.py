"""The loss scale of fp16: a small state machine. Every rank runs it on the same inputs, so all have the same scale.

    clean step   window clean steps since the last overflow or growth?  -> GROWN: scale * 2, hysteresis refilled
                 else                                                   -> KEPT
    overflow     hysteresis left?                                       -> TOLERATED: hysteresis - 1
                 scale above the minimum?                               -> HALVED: max(scale / 2, minimum)
                 else                                                   -> AT_FLOOR: the caller decides

The sequence of scales is DeepSpeed's, except at the minimum: there DeepSpeed ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shoal.config.checks import loss_scale_problems
from shoal.errors import ConfigError

FACTOR = 2.0


class Event(Enum):
    """What a step did to the scale."""

    GROWN = "grown"
    KEPT = "kept"
    TOLERATED = "tolerated"  # an overflow, and the scale stays: hysteresis, or a static scale
    HALVED = "halved"
    AT_FLOOR = "at_floor"  # an overflow at the lowest scale


@dataclass(frozen=True)
class LossScaleSettings:
    """The ``fp16`` section's numbers, under its names.

    Args:
        loss_scale: 0: dynamic; above 0: this scale always.
        initial_scale_power: a dynamic scale starts at 2 to this power.
        loss_scale_window: clean steps before the scale doubles.
        hysteresis: the overflow that halves the scale is the one with this number; those before it are tolerated.
        consecutive_hysteresis: every clean step refills the hysteresis; otherwise only growth does.
        min_loss_scale: the minimum of a dynamic scale.

    Raises: ConfigError: numbers outside their range; all of them in one error.
    """

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        wrong = []
        if not (math.isfinite(self.loss_scale) and self.loss_scale >= 0):
            wrong.append(f"loss_scale is {self.loss_scale}, expected a finite number, 0 (dynamic) or above")
        wrong += [f"{name} is {what.removesuffix('.')}" for name, what, _ in loss_scale_problems(self)]
        if wrong:
            raise ConfigError("; ".join(wrong) + ".", where="section 'fp16'", do="fix these keys.", code="loss-scale")

    @property
    def is_dynamic(self) -> bool:
        return self.loss_scale == 0


class LossScale:
    """A loss scale and its state.

    >>> scale = LossScale(LossScaleSettings(initial_scale_power=3, hysteresis=1))
    >>> scale.scale, scale.update(overflow=True), scale.scale
    (8.0, <Event.HALVED: 'halved'>, 4.0)
    """

    def __init__(self, settings: LossScaleSettings | None = None) -> None:
        self.settings = settings if settings is not None else LossScaleSettings()
        self._scale = (
            FACTOR**self.settings.initial_scale_power if self.settings.is_dynamic else self.settings.loss_scale
        )
        self._iteration = 0
        self._last_overflow = -1
        self._hysteresis = self.settings.hysteresis

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    @property
    def iteration(self) -> int:
        """Steps counted so far."""
        return self._iteration

    def update(self, overflow: bool) -> Event:
        """Update the scale by the outcome of a step, which is the same on every rank.

        Returns: what happened to the scale. A static scale is KEPT, or TOLERATED after an overflow. Nothing is raised
            at the minimum.
        """
        if not self.settings.is_dynamic:
            event = Event.TOLERATED if overflow else Event.KEPT
        elif overflow:
            event = self._after_overflow()
            self._last_overflow = self._iteration
        else:
            event = self._after_clean_step()
        self._iteration += 1
        return event

    def _after_overflow(self) -> Event:
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return Event.TOLERATED
        if self._scale <= self.settings.min_loss_scale:
            return Event.AT_FLOOR
        self._scale = max(self._scale / FACTOR, self.settings.min_loss_scale)
        return Event.HALVED

    def _after_clean_step(self) -> Event:
        settings = self.settings
        if settings.consecutive_hysteresis:
            self._hysteresis = settings.hysteresis
        clean = self._iteration - self._last_overflow - 1  # clean steps before this one
        if clean == 0 or clean % settings.loss_scale_window:
            return Event.KEPT
        self._hysteresis = settings.hysteresis
        self._scale *= FACTOR
        return Event.GROWN

    def state_dict(self) -> dict[str, float | int]:
        """The state as plain numbers, for ``load_state_dict``."""
        return {
            "scale": self._scale,
            "iteration": self._iteration,
            "last_overflow_iteration": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Load ``state``. A static scale keeps the scale of its settings.

        Raises: KeyError: an entry is missing.
        """
        if self.settings.is_dynamic:
            self._scale = float(state["scale"])
        self._iteration = int(state["iteration"])
        self._last_overflow = int(state["last_overflow_iteration"])
        self._hysteresis = int(state["hysteresis"])
