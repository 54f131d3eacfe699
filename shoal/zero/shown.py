"""Gradients that parameters show in ``.grad`` once they are summed, for an optimizer that reads them there.

backward           autograd's ``.grad`` is taken into the sum, as ever
reduced            ``.grad`` shows the sum over the ranks; the script may read it, scale it, replace it, or drop it
next pass, step    ``take_back``: what ``.grad`` shows now is the sum
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.memory.layout import Segment
from shoal.zero.gradient import BucketGradient, GradientState


class ShownGradient(BucketGradient):
    """The gradient of a bucket whose parameters show theirs.

    Memory: an accumulator for each step, since a script may keep what it was shown.

    Where parameters have another format than the master weights (bf16 and fp32), torch lets them show none, and only
    the optimizer sees it.
    """

    has_own_pieces = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown: list[torch.Tensor] = []  # by parameter; none: nothing is shown

    def value(self, slot: int) -> torch.Tensor:
        """The sum for one parameter, in its shape; the memory itself, or a sparse tensor."""
        self.accumulator()
        return self._views[slot]

    def _replace(self, slot: int, value: torch.Tensor | None) -> None:
        """The script has set another gradient, or none."""
        view = self.value(slot)
        if value is None:
            view.zero_()
        elif value.is_sparse:
            view.copy_(value.to_dense())
        else:
            view.copy_(value)

    def settle(self, *, at_step: bool) -> None:
        work = self._work
        super().settle(at_step=at_step)
        if work is not None and self.state is GradientState.REDUCED:
            work.drain()  # a script may scale what it sees, which peers may still be reading
            self._show()

    def _show(self) -> None:
        if self.bucket.dtype != self.dtype or self.state is not GradientState.REDUCED:
            return
        self._shown = [self.value(slot) for slot in range(len(self.parameters))]
        for parameter, value in zip(self.parameters, self._shown, strict=True):
            parameter.grad = value

    @torch.no_grad()
    def take_back(self) -> None:
        shown, self._shown = self._shown, []
        changed = []
        for slot, (parameter, value) in enumerate(zip(self.parameters, shown, strict=False)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not value:
                changed.append((slot, gradient))
        if changed:
            self._leave_memory()
        for slot, gradient in changed:
            self._replace(slot, gradient)
            self.touched[slot] = gradient is not None

    def _leave_memory(self) -> None:
        """The script may keep what it has seen: the sum goes on elsewhere."""
        seen, self._accumulator = self._accumulator, None
        if seen is not None:
            self.accumulator().copy_(seen)

    def reset(self) -> None:
        if self._shown:
            self._shown = []
            for parameter in self.parameters:
                parameter.grad = None
        self._accumulator, self._views = None, []  # the script's now, if it has kept what it saw
        super().reset()

    def export(self) -> dict[str, Any] | None:
        if not self._shown:
            return super().export()
        self.take_back()
        saved = super().export()
        self._show()
        return saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        super().restore(saved)
        self._show()

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        self.take_back()
        super().write(slot, segment, values)
        self._show()
