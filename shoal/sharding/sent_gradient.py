"""The formats in which a gradient is sent, and error feedback: what a reduction loses is added to the next one.

| error | what it has                                             | memory, fp32                              |
| ----- | ------------------------------------------------------- | ----------------------------------------- |
| first | what this rank's gradient lost, before the sum          | the whole buffer, from the first pass on  |
| sum   | what the sum lost, where it is sent to all ranks again  | this rank's range (stage 0)               |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from shoal.comm.wire import Wire
from shoal.sharding.buffer import Axis, FlatBuffer, Wires
from shoal.sharding.placement import PARTIAL, SHARD, Placement
from shoal.sharding.table import Row
from shoal.streams import name_memory

ERRORS = ("wire_error", "wire_error_sum")  # their kinds in a checkpoint: of this rank's owned range


class KeptState(Protocol):
    """What a group keeps from step to step in addition to optimizer state. A checkpoint has it by element, too."""

    kind: str  # the ledger's

    @property
    def buffers(self) -> Sequence[FlatBuffer]:
        """Its memory."""
        ...

    @property
    def saved(self) -> Mapping[str, torch.Tensor]:
        """By its kind in a checkpoint, this rank's owned range of what a save or a load reads or fills."""
        ...

    def share(self) -> None:
        """Before a save: let ranks that hold the same range have the same values. Every rank calls."""
        ...

    def expect(self, keys: Collection[str]) -> None:
        """A checkpoint has states of these kinds: ``saved`` will be filled."""
        ...

    def restore(self) -> None:
        """After a load of weights, and perhaps of ``saved``. Every rank calls."""
        ...


class SentGradient:
    """How the gradient of one parameter group is sent, and what is kept of what was lost (a ``KeptState``).

    Args:
        buffer: of the parameters.
        axes: by name, what sums along each axis on which the gradient is Partial.
    """

    kind = "error"

    def __init__(self, buffer: FlatBuffer, row: Row, axes: Mapping[str, Axis]) -> None:
        sent = row.sent
        self._buffer = buffer
        self.saved: dict[str, torch.Tensor] = {}  # what a checkpoint under way saves of this rank's range
        self._wires = {axis: Wire(each, sent.between, error_decay=sent.error_decay) for axis, each in sent.reduce}
        self._axis = next((axis for axis in self._wires if axes[axis].size > 1), "")
        self.is_on = True  # False: the next reductions are sent as they are
        # Without an error, zeros are decoded to zeros, except by the sign.
        self._fills_gaps = sent.has_error or any(each.name == "1bit" for _, each in sent.reduce)
        self.errors: tuple[FlatBuffer, ...] = ()  # of the first axis
        if sent.has_error and self._axis:
            placed = [row.gradient]
            if not row.gradient_at_step.is_sharded:
                placed.append(Placement.of(**{self._axis: SHARD}))
            self.errors = tuple(
                FlatBuffer(buffer.label, buffer.layout, torch.float32, buffer.device, buffer.comm, axes, each)
                for each in placed
            )

    @property
    def buffers(self) -> tuple[FlatBuffer, ...]:
        """The errors."""
        return self.errors

    @property
    def fills_gaps(self) -> bool:
        """True if decoding leaves something between the parameters."""
        return self.is_on and self._fills_gaps

    def wires(self) -> Wires | None:
        """The format along each axis; None: nothing is encoded."""
        if not self.is_on:
            return None
        self._allocate()
        return self._wires or None

    def _allocate(self) -> None:
        if self.errors and not self.errors[0].has_memory:
            for error in self.errors:
                zeros = torch.zeros(error.stored_numel, dtype=error.dtype, device=error.device)
                error.store(name_memory(zeros, f"the error of unit {error.label!r}", "error"))
            self._feed_back()

    def move(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep the errors where ``copied`` copies them, for ``offload_states`` and back."""
        if self.errors and self.errors[0].has_memory:
            for error in self.errors:
                error.store(copied(error.stored_values))
            self._feed_back()

    def _feed_back(self) -> None:
        """Let the first axis add the errors, where they are now, and set them."""
        first, *others = (error.stored_values for error in self.errors)
        self._set_errors(first, others[0] if others else None)

    def _set_errors(self, first: torch.Tensor | None, second: torch.Tensor | None) -> None:
        self._wires[self._axis] = replace(self._wires[self._axis], error=first, second_error=second)

    def clear_gaps(self, values: torch.Tensor, begin: int) -> None:
        """Set to zero what decoding has left between the parameters, which belongs to no gradient.

        Args:
            values: of the buffer, from ``begin`` on. 1-D.
        """
        at = 0
        for segment in self._buffer.layout.segments_in(begin, begin + values.numel()):
            values[at : segment.start].zero_()
            at = segment.stop
        values[at:].zero_()

    # to and from a checkpoint

    def share(self) -> None:
        """Give every rank the mean of the ranks' errors, and keep this rank's range of it in ``saved``.

        What the reductions to come add up to is the same. So a checkpoint has one error for each element, which any
        layout loads, and a run that is continued from it has the bits of the one that went on.

        Communicates: an all_reduce of the buffer in fp32 along each axis of the gradient; at stage 0
            one more.
        """
        if not self.errors or not self.errors[0].stored_values.numel():
            return
        first, *others = self.errors
        num_ranks = math.prod(axis.size for axis in first.axes.values())
        partial = first.placement
        first.redistribute(Placement(), scale=1 / num_ranks).drain()
        first.assume(partial)
        self.clear_gaps(first.full, 0)  # which a checkpoint does not have
        owned = slice(self._buffer.begin, self._buffer.end)
        self.saved = {"wire_error": first.full[owned].clone()}
        for other in others:
            self.clear_gaps(other.stored_values, other.begin)
            self.saved["wire_error_sum"] = self._gathered(other.stored_values, other.begin)

    def _gathered(self, part: torch.Tensor, begin: int) -> torch.Tensor:
        """The whole buffer of which each rank has a part, as a sum in which the others are zero."""
        first = self.errors[0]
        full = torch.zeros(first.layout.numel, dtype=first.dtype, device=first.device)
        full[begin : begin + part.numel()].copy_(part)
        first.sum_like(full, first.axes, Placement.of(**{self._axis: PARTIAL}))
        return full

    def expect(self, keys: Collection[str]) -> None:
        """A checkpoint has these errors: allocate ``saved``, which its values are copied to."""
        self.forget()
        if self.errors:
            numel = self._buffer.owned_numel
            self.saved = {
                key: torch.zeros(numel, dtype=torch.float32, device=self._buffer.device)
                for key in ERRORS
                if key in keys
            }

    def restore(self) -> None:
        """Set the errors to what ``saved`` has, perhaps of another layout. Every rank calls.

        Communicates: where optimizer state is sharded, an all_reduce of the buffer in fp32.
        """
        saved, self.saved = self.saved, {}
        if not saved:
            return
        self._allocate()
        first, *others = self.errors
        owned = saved["wire_error"]
        is_whole = owned.numel() == first.full.numel()
        first.full.copy_(owned if is_whole else self._gathered(owned, self._buffer.begin))
        for other in others:
            if "wire_error_sum" in saved:
                other.stored_values.copy_(saved["wire_error_sum"][other.begin : other.end])

    def scale(self, factor: float) -> None:
        """The gradients to come are larger by ``factor`` (the loss scale)."""
        for error in self.errors:
            error.stored_values.mul_(factor)

    def forget(self) -> None:
        """Nothing was lost."""
        self.saved = {}
        for error in self.errors:
            error.drop()
        if self.errors:
            self._set_errors(None, None)
