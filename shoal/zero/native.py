"""The gradient of a bucket on one rank, left where autograd puts it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.memory.layout import Segment
from shoal.zero.gradient import BucketGradient
from shoal.zero.sparse import summed


class NativeGradient(BucketGradient):
    """On one rank there is nothing to reduce, and nothing is copied.

    Autograd accumulates into ``parameter.grad`` and the optimizer reads it there. Once several micro-batches are to be
    added up in a wider dtype, it is a gradient like any other.
    """

    is_watched = False
    has_own_pieces = True

    # The base class says it once and for all; here the accumulator may be widened while the step goes on.
    @property
    def is_native(self) -> bool:  # type: ignore[override]
        return self.dtype == self.bucket.dtype

    def accumulate(self) -> None:
        self._widen()
        if not self.is_native:
            super().accumulate()

    def start_reduce(self, *, at_step: bool) -> None:
        if not at_step:
            self._widen()
        if not self.is_native:
            super().start_reduce(at_step=at_step)

    def settle(self, *, at_step: bool) -> None:
        if not self.is_native:
            super().settle(at_step=at_step)
            return
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.touched[index] = 1
                if parameter.grad.is_sparse:
                    parameter.grad = summed(parameter.grad, parameter.dtype).to_dense()

    def has_new(self) -> bool:
        return not self.is_native and super().has_new()

    def complete(self) -> None:
        if self.is_native:
            self.settle(at_step=True)
        else:
            super().complete()

    def norm_squared(self) -> torch.Tensor:
        if not self.is_native:
            return super().norm_squared()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=self.bucket.full.device)
        wide = torch.float64 if self.bucket.dtype == torch.float64 else torch.float32
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).square().sum()

    def part(self, start: int, stop: int, segments: Sequence[Segment]) -> torch.Tensor:
        if not self.is_native:
            return super().part(start, stop, segments)
        (segment,) = segments  # on one rank a piece lies in one parameter
        gradient = self.parameters[segment.slot].grad
        assert gradient is not None
        return gradient.reshape(-1)[segment.offset : segment.offset + stop - start]

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        if not self.is_native:
            super().write(slot, segment, values)
            return
        parameter = self.parameters[slot]  # one rank: its part is all of it
        parameter.grad = values.to(parameter.dtype).view(parameter.shape).clone()

    def owned(self) -> torch.Tensor:
        """The gradients in one flat tensor; a copy where they are native (then for the accessors)."""
        if not self.is_native:
            return super().owned()
        flat = torch.zeros(self.layout.numel, dtype=self.bucket.dtype, device=self.bucket.full.device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if parameter.grad is not None:
                flat[slot.offset : slot.offset + slot.numel] = parameter.grad.reshape(-1)
        return flat

    def reset(self) -> None:
        if self.is_native:
            for parameter in self.parameters:
                parameter.grad = None
        super().reset()
