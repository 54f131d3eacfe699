"""A gradient whose sum ``parameter.grad`` shows between two passes (``gradient_as_bucket_view``).

show        a pass has ended: from now on ``parameter.grad`` is a view of the sum
the script  reads it, scales it, replaces it or drops it
take_back   a pass or the step begins: what ``parameter.grad`` holds now is the sum
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.sharding.gradient import Gradient, GradientState
from shoal.sharding.layout import Segment


class ShownGradient(Gradient):
    """The gradient of a group whose sum is the whole buffer.

    Memory: until the step, since the script may keep what it has seen. In another dtype than the parameters' the sum is
    not shown: torch refuses it.
    """

    is_view = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown: list[torch.Tensor] = []  # by parameter, what ``.grad`` was set to

    @property
    def is_shown(self) -> bool:
        return bool(self._shown)

    def _has_new(self) -> bool:
        if not self._shown:
            return super()._has_new()
        pairs = zip(self.parameters, self._shown, strict=True)
        return any(p.grad is not None and p.grad is not view for p, view in pairs)

    def show(self) -> None:
        if self.state is not GradientState.REDUCED:
            return
        if self._has_new() and self.buffer.comm.size == 1:  # arrived after the reduction
            self.reduce(at_step=True)
            self.wait(at_step=True)
        if not self._has_new():
            self.show_sum()

    def show_sum(self) -> None:
        if not self._can_be_shown or self.state is not GradientState.REDUCED:
            return
        self._shown = [self.value(slot) for slot in range(len(self.parameters))]
        for slot, (parameter, value) in enumerate(zip(self.parameters, self._shown, strict=True)):
            if self.has_grad[slot] or self.buffer.comm.size > 1:
                parameter.grad = value

    @property
    def _can_be_shown(self) -> bool:
        return self.buffer.dtype == self.dtype

    @torch.no_grad()
    def take_back(self) -> None:
        shown, self._shown = self._shown, []
        changed = []
        for slot, (parameter, value) in enumerate(zip(self.parameters, shown, strict=False)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not value and (gradient is not None or self.has_grad[slot] or self.buffer.comm.size > 1):
                changed.append((slot, gradient))
        if changed:
            self._leave_memory()
        for slot, gradient in changed:
            self._replace(slot, gradient)
            self.has_grad[slot] = gradient is not None

    def _leave_memory(self) -> None:
        """The script may keep what it has seen: the sum continues in other memory."""
        flat = self.memory()
        self.sum.drop()
        self.memory().copy_(flat)

    def _replace(self, slot: int, value: torch.Tensor | None) -> None:
        """The script has set another gradient, or none."""
        view = self.value(slot)
        if value is None:
            view.zero_()
        else:
            view.copy_(value.to_dense() if value.is_sparse else value)

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        self.take_back()
        super().write(slot, segment, values)
        self.show_sum()

    def reset(self) -> None:
        """Drop the gradient of this step and its memory."""
        if self._shown:
            self._shown = []
            self._clear_parameters()
        super().reset()
        self._drop_memory()
        self.sum.reader = None
