"""The gradient of a parameter group: from ``parameter.grad`` to this rank's range of the sum over the ranks.

    backward            autograd leaves each parameter's gradient in ``parameter.grad``
    accumulate          it is added to ``sum``, where that is the whole buffer (stages 0 and 1), or, in ``no_sync``, to
                        ``unsynced`` (stages 2 and 3)
    reduce, wait        ``redistribute``: the sum over the ranks; a gradient that is missing counts as zeros
    step                the optimizer reads ``owned()``

| buffer     | what it has                                            | memory                                    |
| ---------- | ------------------------------------------------------ | ----------------------------------------- |
| `sum`      | the sum so far: the whole, or this rank's range        | from the first backward pass              |
| `unsynced` | the whole of passes in ``no_sync``, next to a range    | from such a pass to the next reduction    |
| staging    | the whole of one pass, next to a range                 | while it is reduced; groups share it      |

Where the optimizer decides what is summed (``is_left_partial``), ``sum`` has this rank's own gradient at the step.

A gradient that arrives after its group was reduced stays in ``parameter.grad`` and joins the next reduction, at the
latest at the step.

``ShownGradient`` shows the sum in ``parameter.grad``, ``OffloadedGradient`` keeps it on the host, and
``SparseGradient`` has rows of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch

from shoal.comm.protocol import Work
from shoal.comm.side_stream import CopyDone
from shoal.sharding.buffer import Axis, FlatBuffer
from shoal.sharding.layout import Segment
from shoal.sharding.placement import Placement
from shoal.sharding.sent_gradient import SentGradient
from shoal.sharding.sparse_sum import coalesced
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.table import Row
from shoal.streams import name_memory


class GradientState(Enum):
    NONE = "NONE"  # nothing of this step
    ACCUMULATING = "ACCUMULATING"  # the sum lacks micro-batches, or ranks
    REDUCING = "REDUCING"  # a collective reads or writes it
    REDUCED = "REDUCED"  # this rank's range holds the sum over all ranks


@dataclass(frozen=True)
class GradientPolicy:
    """How gradients are summed.

    Args:
        accumulate_dtype: of the sum; None: the parameter's, and from the first step of several micro-batches on
            that of the main parameters.
        reduce_dtype: of what is sent; None: the sum's where that is sent, else the parameter's.
        pre_scale: factor before the sum over ranks; ``post_scale``: after it.
    """

    accumulate_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    pre_scale: float = 1.0
    post_scale: float = 1.0


class Gradient:
    """The gradient of one parameter group.

    Args:
        buffer: of the parameters.
        axes: by name, what sums along each axis on which the gradient is Partial.
        sum_dtype: of the sum, once a second micro-batch is added; None: it stays as it is.

    Memory: a sum of the whole buffer where the gradient between micro-batches is Partial, else of this rank's range;
    from the first backward pass on. While a group whose sum is a range is reduced, a staging buffer has the whole. In
    ``no_sync`` also a whole buffer of the sum's dtype, until the next reduction.
    """

    is_sparse: ClassVar[bool] = False  # True if it has the rows that were looked up, not the table
    is_view: ClassVar[bool] = False  # True if ``parameter.grad`` shows the sum
    moves_to_host: ClassVar[bool] = False  # True if no whole sum waits for the step, on one rank either

    def __init__(
        self,
        buffer: FlatBuffer,
        parameters: Sequence[torch.nn.Parameter],
        row: Row,
        policy: GradientPolicy,
        axes: Mapping[str, Axis],
        staging: StagingBuffers,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.buffer = buffer
        self.layout = buffer.layout
        self.parameters = list(parameters)
        self.row = row
        self.policy = policy
        self.axes = axes
        self.adds_in_place = False  # autograd adds later micro-batches into the sum: ``parameter.grad`` is a view of it
        self.is_attached = False  # True if every ``parameter.grad`` is such a view
        self.is_left_partial = False  # True: until the optimizer averages it, each rank has its own gradient
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))  # a gradient arrived on this rank since the last step
        self.num_reductions = 0  # ever begun: distinguishes one step's gradient from the next one's
        self.moved: dict[str, Any] | None = None  # the open gradient, while ``offload_states`` has it in host memory
        self._staging = staging
        staging.register(self.layout)
        dtype = policy.accumulate_dtype or buffer.dtype
        self.sum_dtype = sum_dtype or dtype
        self.is_alone = buffer.comm.size == 1 and len(axes) == 1  # True if there is one rank
        between = row.gradient if self.is_alone and not self.moves_to_host else row.gradient_between
        self.is_whole = not between.is_sharded  # True if the sum is the whole buffer
        self._is_whole_at_step = not row.gradient_at_step.is_sharded
        self.sum, self.unsynced = (
            FlatBuffer(buffer.label, self.layout, dtype, buffer.device, buffer.comm, axes, stored, owned=buffer.owned)
            for stored in (between, row.gradient)
        )
        self.sent = SentGradient(buffer, row, axes)
        self.copied = CopyDone()  # the last copy to the host that reads the sum: before another step's it is waited for
        self._left: list[torch.Tensor | None] = []  # by parameter, the ``.grad`` that the last pass left
        self._work: Work | None = None
        self._finish: Callable[[], None] | None = None  # what follows once ``_work`` is done

    # memory

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return self.sum.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the sum has, or will have."""
        return self.sum.nbytes_stored

    @property
    def version(self) -> tuple[int, int]:
        """Changes with the values: the number of reductions, and the version counter of the memory."""
        return self.num_reductions, self.owned()._version

    @property
    def offloaded_norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of a sum that is on the host; None: it is on the device."""
        return None

    def memory(self, *, is_overwritten: bool = False) -> torch.Tensor:
        """The sum, on the device; allocated at the first call, with zeros unless every parameter is overwritten now."""
        flat = self.sum.stored_values
        if not flat.numel():
            numel = self.sum.stored_numel
            flat = name_memory(self._allocate(numel), f"the gradient of unit {self.buffer.label!r}", "gradient")
            self.sum.store(flat)
            if not is_overwritten or self.layout.parameter_numel < numel:  # with gaps, which stay zero
                flat.zero_()
        return flat

    def _allocate(self, numel: int) -> torch.Tensor:
        total = self.sum
        if self.is_whole:
            return total.comm.empty(numel, total.dtype, total.device)
        return torch.empty(numel, dtype=total.dtype, device=total.device)

    def _drop_memory(self) -> None:
        self.sum.drop()

    def owned(self) -> torch.Tensor:
        """The range of the reduced gradient that this rank's optimizer reads. Shape: [owned numel]."""
        flat = self.memory()
        return self.sum.shard if self.is_whole and not self._is_whole_at_step else flat

    def value(self, slot: int) -> torch.Tensor:
        """The sum for one parameter, in its shape, where the sum is whole: the memory itself, or a sparse tensor."""
        return self.sum.views[slot]

    def widen(self) -> None:
        """Several micro-batches are added up: from now on in the dtype of sums."""
        if self.dtype == self.sum_dtype:
            return
        narrow = None if self.state is GradientState.NONE else self.memory()
        self.sum.dtype = self.sum_dtype
        self.sum.wait_for_reader()
        self._drop_memory()
        if narrow is not None:
            self.memory().copy_(narrow)

    # from parameter.grad

    def has_unreduced(self) -> bool:
        """True if there is a gradient that no reduction has seen."""
        return self.unsynced.has_memory or self._has_new()

    def _has_new(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def accumulate(self) -> None:
        """Add the parameters' gradients to what is kept until the next reduction. Communicates nothing.

        Where the sum is a range they are kept whole on this rank; where it has the parameters' dtype, autograd adds
        them up in ``parameter.grad``. So do gradients that arrive after the reduction.
        """
        if self.is_attached or not self._has_new() or (self.state is GradientState.REDUCED and self.is_whole):
            return
        if not self.is_whole:
            if self.sum_dtype != self.buffer.dtype:
                self.widen()
                self._add_unsynced()
            return
        self._accumulate_whole()
        if self.adds_in_place and self.dtype == self.sum_dtype == self.buffer.dtype:
            for parameter, view, has_grad in zip(self.parameters, self.sum.views, self.has_grad, strict=True):
                parameter.grad = view if has_grad else None
            self.is_attached = all(self.has_grad)

    def _accumulate_whole(self) -> None:
        self.is_attached = False
        is_added = self.state is GradientState.ACCUMULATING
        if is_added and self._has_new():
            self.widen()
        self.memory(is_overwritten=not is_added)
        self.sum.wait_for_reader()
        self.sum.assume(self.row.gradient)
        take_gradients(self.parameters, self.sum.views, self.has_grad, add=is_added)
        self.state = GradientState.ACCUMULATING

    def allocate_unsynced(self) -> FlatBuffer:
        """The whole of passes in ``no_sync``; zeros, where there was none."""
        unsynced = self.unsynced
        if not unsynced.has_memory:
            unsynced.dtype = self.dtype
            full = unsynced.comm.empty(self.layout.numel, self.dtype, unsynced.device)
            unsynced.set_full(name_memory(full, "an unsynced gradient", "gradient").zero_())
        return unsynced

    def _add_unsynced(self) -> None:
        take_gradients(self.parameters, self.allocate_unsynced().views, self.has_grad, add=True)

    # over the ranks

    def reduce(self, *, at_step: bool) -> None:
        """Start to sum over the ranks what the parameters' gradients hold. ``wait`` completes it.

        What is sent is the sum itself where it is whole, else what was added since the last reduction.

        Args:
            at_step: this is the last reduction before the optimizer's step.

        Communicates: what ``redistribute`` does from Partial to the row's placement between micro-batches, or at the
        step.
        """
        policy, is_late = self.policy, self.state is GradientState.REDUCED
        self.num_reductions += 1
        if is_late:
            self.copied.wait()
        if self.is_left_partial:
            self._accumulate_whole()
            return
        to = self.row.gradient_at_step if at_step or self.is_whole else self.row.gradient_between
        source: FlatBuffer | None = None  # None: the parameters' gradients
        adds = False
        if self.is_whole and not is_late:
            self._accumulate_whole()
            source = self.sum
            if policy.pre_scale != 1.0:
                source.full.mul_(policy.pre_scale)
            if policy.reduce_dtype in (None, self.dtype):
                self.state = GradientState.REDUCING
                self._work = source.reader = source.redistribute(to, scale=policy.post_scale, wire=self.sent.wires())
                return
        else:
            if not at_step:
                self.widen()
            if self.unsynced.has_memory:
                self._add_unsynced()
                source = self.unsynced
            adds = self.state is not GradientState.NONE
        is_sum_sent = self.is_whole or source is not None
        dtype = policy.reduce_dtype or (self.dtype if is_sum_sent else self.buffer.dtype)
        is_own = source is self.unsynced and source.dtype == dtype and self._staging.pool is None
        staging = copy(self.unsynced) if is_own else self._staging.acquire(self.layout, dtype)
        staging.label, staging.axes = self.buffer.label, self.axes
        staging.assume(self.row.gradient)
        if source is None:
            take_gradients(self.parameters, staging.views, self.has_grad, add=False)
        elif not is_own:
            staging.full.copy_(source.full)
        if source is not self.sum:
            self.unsynced.drop()
            if policy.pre_scale != 1.0:
                staging.full.mul_(policy.pre_scale)
        self._reduce_staged(staging, to, adds=adds, at_step=at_step)

    def _allocate_part(self, *, at_step: bool) -> torch.Tensor | None:
        """Memory to reduce into what ``wait`` adds to the sum; None: the reduction writes to the sum itself."""
        # What was summed over the replicas already must not be summed again.
        if self.state is GradientState.REDUCED and len(self.axes) > 1 and not self._is_whole_at_step:
            return torch.empty_like(self.owned(), dtype=torch.promote_types(self.dtype, torch.float32))  # rounds once
        return None

    def _add_part(self, part: torch.Tensor) -> None:
        self.owned().add_(part)

    def _reduce_staged(self, staging: FlatBuffer, to: Placement, *, adds: bool, at_step: bool) -> None:
        """Reduce a whole buffer into the sum; ``adds``: to what the sum has."""
        part = self._allocate_part(at_step=at_step)
        target = self.owned() if part is None else part
        accumulate = adds and part is None and not self._is_whole_at_step
        self.state = GradientState.REDUCING
        work = staging.redistribute(
            to, into=target, scale=self.policy.post_scale, accumulate=accumulate, wire=self.sent.wires()
        )
        self._work = work
        self.sum.assume(to)

        def finish() -> None:
            if self._is_whole_at_step and adds:
                target.add_(staging.full)
            elif self._is_whole_at_step:
                target.copy_(staging.full)
            self._staging.release(staging, work)
            if part is not None:
                self._add_part(part)

        self._finish = finish

    def wait(self, *, at_step: bool) -> bool:
        """Wait for the reduction that was issued. Returns: False: none was."""
        if self._work is None:
            return False
        work = self._work
        work.wait()
        if self._finish is not None:
            self._finish()
        self._work, self._finish = None, None
        if self.sent.fills_gaps:
            self.sent.clear_gaps(self.owned(), self.buffer.begin)
        is_sum = at_step or self.is_whole
        self.state = GradientState.REDUCED if is_sum else GradientState.ACCUMULATING
        if self.is_view and is_sum:
            work.drain()  # the script may scale what peers read
        return True

    def complete(self) -> None:
        """At the step: sum over the ranks what no pass has summed yet (accumulation whose end was not announced)."""
        if self.state is GradientState.REDUCED:
            return
        if self.is_whole:
            self.reduce(at_step=True)
            self.wait(at_step=True)
            if self.is_left_partial:
                self.state = GradientState.REDUCED
                self.own(self.policy.pre_scale * self.policy.post_scale * self.num_summed)
            return
        if self.state is GradientState.NONE:  # nothing was reduced: the memory may hold the last step's values
            self.num_reductions += 1
            self.memory().zero_()
        if len(self.axes) > 1:
            self.num_reductions += 1
            self.memory()
            self.sum.assume(self.row.gradient_between)
            self.sum.redistribute(self.row.gradient_at_step, wire=self.sent.wires()).wait()
        self.state = GradientState.REDUCED

    @property
    def num_summed(self) -> int:
        """Ranks whose gradients are added up."""
        return math.prod(axis.size for axis in self.axes.values())

    def own(self, scale: float) -> torch.Tensor:
        """This rank's own gradient times ``scale``, such that the mean over the ranks is the gradient. Shape: [numel].

        It is the memory of the sum, in the dtype of sums: what is written to it is what ``average`` sums.
        """
        self.widen()
        if scale != 1.0:
            self.sum.full.mul_(scale)
        return self.sum.full

    def average(self) -> None:
        """Start to set the memory of the sum to its mean over the ranks. ``wait`` completes it.

        Communicates: as the last reduction before a step.
        """
        self.state = GradientState.REDUCING
        self.sum.assume(self.row.gradient)
        to, scale, wires = self.row.gradient_at_step, 1 / self.num_summed, self.sent.wires()
        self._work = self.sum.reader = self.sum.redistribute(to, scale=scale, wire=wires)

    def norm_part(self) -> torch.Tensor:
        """What this rank adds to the global norm: its range, also where the whole is on every rank. 1-D.

        Of a gradient that is left partial: all of its own.
        """
        owned = self.owned()
        comm = self.buffer.comm
        if self._is_whole_at_step and comm.size > 1 and not self.is_left_partial:
            begin, end = self.layout.owned(comm.rank)
            owned = owned[begin:end]
        return owned

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        """Set this rank's part of one parameter's reduced gradient. ``values``: 1-D."""
        self.copied.wait()
        self.owned()[segment.start : segment.stop].copy_(values)

    def reset(self) -> None:
        """Drop the gradient of this step. The memory stays."""
        self._left = []
        if self.adds_in_place:
            self._clear_parameters()
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))
        self._work, self._finish = None, None
        self.moved = None
        self.unsynced.drop()

    def _clear_parameters(self) -> None:
        self.is_attached = False
        for parameter in self.parameters:
            parameter.grad = None

    def free(self) -> None:
        """Free all memory, but for what reductions have lost."""
        self.reset()
        self.sum.reader = None
        self._drop_memory()

    # what the script sees between two passes

    @property
    def is_shown(self) -> bool:
        """True while ``parameter.grad`` is a view of the sum over the ranks."""
        return False

    def show(self) -> None:
        """A pass has ended: the script may read and assign ``parameter.grad``."""
        self._left = [parameter.grad for parameter in self.parameters]

    def show_sum(self) -> None:
        """Show the sum in ``parameter.grad`` again, after ``take_back``."""

    def take_back(self) -> None:
        """A pass or the step begins: what ``parameter.grad`` shows now is the sum."""

    def assigned(self) -> list[str]:
        """Parameters whose ``.grad`` the script has set since the last pass, where it is no view of the sum."""
        if self.state is not GradientState.REDUCED:
            return []
        pairs = zip(self.parameters, self._left, self.layout.specs, strict=False)
        return [spec.name for p, left, spec in pairs if p.grad is not None and p.grad is not left]


def take_gradients(
    parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor], has_grad: bytearray, *, add: bool
) -> None:
    """Move the parameters' gradients into ``views``: add them, or copy them, with zeros for those that are None.

    Args:
        has_grad: set where there was one. One that is the view itself is in its place already.
    """
    targets, gradients = [], []
    for index, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        gradient = parameter.grad
        if gradient is not None:
            has_grad[index] = 1
            parameter.grad = None
            if gradient is view:
                continue
            if gradient.is_sparse:
                if not add:
                    view.zero_()
                view.add_(coalesced(gradient, view.dtype))
                continue
            targets.append(view)
            gradients.append(gradient)
        elif not add:
            view.zero_()
    if targets and add:
        torch._foreach_add_(targets, gradients)
    elif targets:
        torch._foreach_copy_(targets, gradients)
