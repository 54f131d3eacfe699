"""Decides about a step whose loss or gradients are NaN or infinite: raise, skip, or apply with a warning.

The error or the message names the rank, the step, the parameter and, in a model with experts, the layer whose router
gave weights that are not finite.
"""

from __future__ import annotations

import logging

from shoal.engine.log import logger
from shoal.engine.settings import Properties
from shoal.engine.sharding import Sharding
from shoal.errors import NonFiniteError
from shoal.optim.loss_scale import Event, LossScale
from shoal.parallel.expert.held import first_bad_router
from shoal.running.status import GlobalStatus, first_bad_parameter

# Steps in a row whose loss, before scaling, is not finite. A smaller loss scale repairs none of them.
MAX_BAD_LOSSES = 3  # under a loss scale: one odd batch may overflow in an fp16 forward
MAX_SKIPPED_LOSSES = 10  # where the user asked to skip
MAX_AT_FLOOR = 10  # overflows in a row at the lowest loss scale, which no smaller one can repair


class NonFinite:
    """Decides from the synchronized status, so every rank decides alike.

    ``precision.nonfinite`` is "raise", "skip" or "warn" (apply the step). Without it, a step raises if its loss is not
    finite or unknown (``loss.backward()``); it is skipped if the gradients overflow and the loss is finite. Under a
    loss scale an overflow is skipped and lowers the scale, and raises after 10 at the lowest scale; a loss that is not
    finite is skipped at first, and raises after 3 steps in a row. Too many bad steps in a row raise in any case.
    """

    def __init__(self, properties: Properties, sharding: Sharding, loss_scale: LossScale | None) -> None:
        self._plan = properties.plan
        self._comm = properties.axes.world
        self._sharding = sharding
        self._loss_scale = loss_scale
        self._num_in_a_row = 0
        self._num_bad_losses = 0  # in a row
        self._num_at_floor = 0  # overflows in a row at the lowest loss scale

    def judge(self, status: GlobalStatus, step: int, *, is_loss_known: bool) -> bool:
        """True if the step is to be applied.

        Raises: NonFiniteError: on every rank; the parameters are untouched.
        Communicates: two names per rank, when the gradients are not finite.
        """
        is_loss_bad = bool(status.bad_loss_ranks)
        self._num_bad_losses = self._num_bad_losses + 1 if is_loss_bad else 0
        if status.is_finite:
            self._num_in_a_row = self._num_at_floor = 0
            return True
        self._num_in_a_row += 1
        is_applied = self._plan.nonfinite == "warn"
        what, where = self._describe(status, step, is_loss_known=is_loss_known)
        if self._is_fatal(is_loss_bad=is_loss_bad, is_loss_known=is_loss_known):
            number = self._num_bad_losses if is_loss_bad else self._num_in_a_row
            raise NonFiniteError(
                what + (f" {number} steps in a row." if number > 1 else ""),
                where=where,
                do="look at the data and learning rate of this step; set precision.nonfinite to 'skip' to leave"
                " such steps out and continue. The parameters are as they were before the step." + self._hint(),
            )
        message = f"step {step} {'applied all the same' if is_applied else 'skipped'}: {what} ({where})"
        if self._comm.rank == 0:
            logger.log(logging.INFO if self._loss_scale is not None and not is_loss_bad else logging.WARNING, message)
        return is_applied

    def _is_fatal(self, *, is_loss_bad: bool, is_loss_known: bool) -> bool:
        policy = self._plan.nonfinite
        if policy == "raise" or self._num_in_a_row >= self._plan.max_bad_steps or self._num_at_floor >= MAX_AT_FLOOR:
            return True
        if policy is None:
            if self._loss_scale is not None:
                return self._num_bad_losses >= MAX_BAD_LOSSES
            return is_loss_bad or not is_loss_known
        return self._num_bad_losses >= MAX_SKIPPED_LOSSES

    def adapt_scale(self, status: GlobalStatus, step: int) -> None:
        """Update the loss scale, if there is one, after the step, and log what an overflow did to it."""
        if self._loss_scale is None or status.bad_loss_ranks:  # a bad loss is no overflow
            return
        event = self._loss_scale.update(not status.is_finite)
        self._num_at_floor += event is Event.AT_FLOOR
        if self._comm.rank:
            return
        if event is Event.HALVED:
            logger.info("step %d: overflow, loss scale halved to %g", step, self._loss_scale.scale)
        elif event is Event.AT_FLOOR:
            logger.warning(
                "step %d: overflow at the lowest loss scale %g. Train in bf16, or look at the parameter named above.",
                step,
                self._loss_scale.scale,
            )

    def _hint(self) -> str:
        if self._num_at_floor >= MAX_AT_FLOOR:
            return " The loss scale is at its lowest, so no smaller one repairs the overflows: train in bf16."
        if self._plan.zero.stage < 3:
            return ""
        return (
            " At stage 3 a parameter reads as NaN outside the model's forward (a weight penalty in the loss, say): read"
            " it, and call backward(), inside `with shoal.zero.GatheredParameters(model.parameters())`."
        )

    def _describe(self, status: GlobalStatus, step: int, *, is_loss_known: bool) -> tuple[str, str]:
        comm = self._comm
        mine = first_bad_parameter(self._sharding.groups) if comm.rank in status.bad_gradient_ranks else None
        names = comm.gather_objects([mine, first_bad_router(self._sharding.module)], label="first bad parameter")
        first, router = (next((name for name in column if name), None) for column in zip(*names, strict=True))
        where = f"step {step}" + (f", first parameter {first!r}" if first else "")
        experts = f" The router of {router!r} gave weights that are not finite." if router else ""
        if status.bad_loss_ranks:
            numbers = status.bad_loss_ranks
            ranks = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            return f"the loss of {ranks} is not finite.{experts}", f"{ranks}, {where}"
        if is_loss_known:
            return f"the gradients are not finite though the loss is.{experts}", where
        return f"the gradients are not finite.{experts}", where
