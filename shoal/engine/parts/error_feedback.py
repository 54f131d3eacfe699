"""``wire.error_feedback``: what a format has lost is in units of the loss scale, and is forgotten from time to time."""

from __future__ import annotations

from shoal.engine.accumulation import Accumulation
from shoal.engine.parts.part import Part
from shoal.engine.sharding import Sharding


class ErrorFeedback(Part):
    """Follows the loss scale, and resets what was lost.

    Args:
        reset_steps: steps between two resets; None: never.
    """

    def __init__(self, sharding: Sharding, accumulation: Accumulation, reset_steps: int | None) -> None:
        self._sharding = sharding
        self._accumulation = accumulation
        self._reset_steps = reset_steps
        self._scale = 1.0  # of the gradients of the step under way

    def _current(self) -> float:
        scale = self._accumulation.loss_scale
        return 1.0 if scale is None else scale.scale

    def before_step(self) -> None:
        self._scale = self._current()

    def at_step(self, was_applied: bool) -> None:
        steps, factor = self._accumulation.counters.global_steps, self._current() / self._scale
        is_reset = self._reset_steps is not None and steps % self._reset_steps == 0
        for group in self._sharding.groups:
            if was_applied:
                group.gradient.sent.saved = {}  # the update has waited for a save that read it
            if is_reset:
                group.gradient.sent.forget()
            elif factor != 1.0:
                group.gradient.sent.scale(factor)
