"""The sections of a rank's heartbeat, with the time-outs of ``timeouts``.

initialize            init
forward               step, or evaluation without gradients; of a compiled model's first step compile
backward, step        step
after a step, and
after an evaluation   data: the script's own work

The log of ``goodput`` sums the time of the same sections.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.config.schema import Timeouts
from shoal.engine.parts.part import Part
from shoal.heartbeat import Heartbeat


class Sections(Part):
    """Says in the heartbeat which section begins."""

    def __init__(self, heartbeat: Heartbeat, timeouts: Timeouts) -> None:
        self._heartbeat = heartbeat
        self._timeouts = timeouts
        self._engine: Any = None
        self._has_stepped = False

    def _enter(self, section: str) -> None:
        self._heartbeat.enter(section, getattr(self._timeouts, section), self._engine.global_steps)

    def _enter_step(self) -> None:
        self._enter("compile" if self._engine.is_compiled and not self._has_stepped else "step")

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        self._enter("data")

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._enter_step()
        else:
            self._enter("evaluation")

    def after_forward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._enter("data")

    def explain(self, error: Exception) -> None:
        self._enter("data")  # the script may handle it

    def before_backward(self, loss: torch.Tensor) -> None:
        self._enter_step()

    def before_step(self) -> None:
        self._enter_step()

    def after_step(self) -> None:
        self._has_stepped = True
        self._enter("data")

    def before_destroy(self) -> None:
        self._heartbeat.enter("data", None, self._engine.global_steps)
        self._heartbeat.end_log()
