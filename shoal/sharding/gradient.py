"""The gradient of a parameter group: from ``parameter.grad`` to this rank's range of the sum over the ranks.

    backward            autograd leaves each parameter's gradient in ``parameter.grad``
    accumulate          it is added to the accumulator: the whole buffer (stages 0 and 1), or, in ``no_sync``, the
                        unsynced gradient (stages 2 and 3)
    reduce, wait        ``redistribute``: the sum over the ranks; a gradient that is missing counts as zeros
    step                the optimizer reads ``owned()``

A gradient that arrives after its group was reduced stays in ``parameter.grad`` and joins the next reduction, at the
latest at the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from shoal.comm.protocol import Work
from shoal.sharding.accumulator import Accumulator, UnsyncedGradient, take_gradients
from shoal.sharding.buffer import Axis, FlatBuffer
from shoal.sharding.layout import Segment
from shoal.sharding.parameter_buffer import ParameterBuffer
from shoal.sharding.placement import Placement
from shoal.sharding.sparse_sum import coalesced
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.table import Row


class GradientState(Enum):
    NONE = "NONE"  # no memory beyond the accumulator
    ACCUMULATING = "ACCUMULATING"  # the accumulator holds a part of the sum
    REDUCING = "REDUCING"  # a collective reads or writes it
    REDUCED = "REDUCED"  # this rank's range holds the sum over all ranks


@dataclass(frozen=True)
class GradientPolicy:
    """How gradients are summed.

    Args:
        accumulate_dtype: of the accumulator; None: the parameter's, and from the first step of several micro-batches on
            that of the main parameters.
        reduce_dtype: of what is sent; None: the accumulator's where that is sent, else the parameter's.
        pre_scale: factor before the sum over ranks; ``post_scale``: after it.
    """

    accumulate_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    pre_scale: float = 1.0
    post_scale: float = 1.0


class GradientBuffer:
    """The gradient of one parameter group.

    Args:
        axes: by name, what sums along each axis on which the gradient is Partial.
        sum_dtype: the accumulator's once a second micro-batch is added; None: it stays as it is.
        is_view: after the reduction ``parameter.grad`` is a view of the sum, in which the script may scale, replace or
            drop it (``gradient_as_bucket_view``). Needs the whole sum on this rank, in the parameter's dtype.

    Memory: an accumulator of the whole buffer where the gradient between micro-batches is Partial, else of this rank's
    range; from the first backward pass on (``is_view``: until the step; offloaded: until it has been copied to the
    host, in a buffer that groups share). While a group whose accumulator is a shard is reduced, a staging buffer holds
    the whole. In ``no_sync`` also a whole tensor of the sum's dtype, until the next reduction.
    """

    is_sparse = False  # True if it holds the rows that were looked up, not the table

    def __init__(
        self,
        parameters: ParameterBuffer,
        row: Row,
        policy: GradientPolicy,
        axes: Mapping[str, Axis],
        staging: StagingBuffers,
        sum_dtype: torch.dtype | None = None,
        *,
        is_view: bool = False,
    ) -> None:
        self.buffer = parameters
        self.layout = parameters.layout
        self.parameters = parameters.parameters
        self.row = row
        self.policy = policy
        self.axes = axes
        self.is_view = is_view
        self.adds_in_place = False  # autograd adds later micro-batches into the sum: ``parameter.grad`` is a view of it
        self.is_attached = False  # True if every ``parameter.grad`` is such a view
        dtype = policy.accumulate_dtype or parameters.dtype
        self._sum_dtype = sum_dtype or dtype
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))  # a gradient arrived on this rank since the last step
        self.num_reductions = 0  # ever begun: distinguishes one step's gradient from the next one's
        self._staging = staging
        staging.register(self.layout)
        self.is_alone = parameters.comm.size == 1 and len(axes) == 1  # True if there is one rank
        self.is_whole = self.is_alone or not row.is_gradient_sharded  # True if the accumulator is the whole buffer
        self._is_whole_at_step = not row.gradient_at_step.is_sharded
        self.accumulator = Accumulator(parameters, staging, dtype, is_whole=self.is_whole)
        self._unsynced = UnsyncedGradient(self.layout, parameters.full.device)
        self._shown: list[torch.Tensor] = []  # by parameter, what ``.grad`` was set to
        self._left: list[torch.Tensor | None] = []  # by parameter, the ``.grad`` that the last pass left; not views
        self._work: Work | None = None
        self._after: Callable[[], None] | None = None
        self._moved: dict[str, Any] | None = None  # what ``export`` gave, while ``offload_states`` has it

    # memory

    @property
    def dtype(self) -> torch.dtype:
        """The accumulator's."""
        return self.accumulator.dtype

    @property
    def version(self) -> tuple[int, int]:
        """Changes with the values: the number of reductions, and the version counter of the memory."""
        on_host = self.accumulator.host_version
        return self.num_reductions + self.accumulator.num_fetches, (
            self.owned()._version if on_host is None else on_host
        )

    @property
    def offloaded_norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of an accumulator that is on the host; None: it is on the device."""
        return self.accumulator.host_norm_squared

    def owned(self) -> torch.Tensor:
        """The range of the reduced gradient that this rank's optimizer reads. Shape: [owned numel]."""
        flat = self.accumulator.memory()
        return flat[self.buffer.begin : self.buffer.end] if self.is_whole and not self._is_whole_at_step else flat

    @property
    def nbytes_unsynced(self) -> int:
        """Bytes of the gradients of passes in ``no_sync``."""
        return 0 if self._unsynced.flat is None else self._unsynced.flat.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the accumulator holds, or will."""
        return self.accumulator.numel * self.dtype.itemsize

    def _widen(self) -> None:
        """Several micro-batches are added up: from now on in the dtype of such sums."""
        if self.dtype != self._sum_dtype:
            self.accumulator.widen(self._sum_dtype, is_kept=self.state is not GradientState.NONE)

    # from parameter.grad

    def has_unreduced(self) -> bool:
        """True if there is a gradient that no reduction has seen."""
        return self._unsynced.flat is not None or self._has_new()

    @property
    def is_shown(self) -> bool:
        """True while ``parameter.grad`` is a view of the sum over the ranks."""
        return bool(self._shown)

    def _has_new(self) -> bool:
        if self._shown:
            pairs = zip(self.parameters, self._shown, strict=True)
            return any(p.grad is not None and p.grad is not view for p, view in pairs)
        return any(p.grad is not None for p in self.parameters)

    def accumulate(self) -> None:
        """Add the parameters' gradients to what is kept until the next reduction. Communicates nothing.

        A sharded accumulator keeps them whole on this rank; where the sum has the parameters' dtype, autograd adds
        them up in ``parameter.grad``. So do gradients that arrive after the reduction.
        """
        if self.is_attached or not self._has_new() or (self.state is GradientState.REDUCED and self.is_whole):
            return
        if not self.is_whole:
            if self._sum_dtype != self.buffer.dtype:
                self._widen()
                self._unsynced.add(self.parameters, self.has_grad, self.dtype)
            return
        if self.state is GradientState.ACCUMULATING:
            self._widen()
        self._accumulate_whole()
        if self.adds_in_place and self.dtype == self._sum_dtype == self.buffer.dtype:
            for parameter, view, has_grad in zip(self.parameters, self.accumulator.views, self.has_grad, strict=True):
                parameter.grad = view if has_grad else None
            self.is_attached = all(self.has_grad)

    def _accumulate_whole(self) -> None:
        self.is_attached = False
        is_sum = self.state is GradientState.ACCUMULATING
        self.accumulator.memory(is_overwritten=not is_sum)
        self.accumulator.wait_for_reader()
        take_gradients(self.parameters, self.accumulator.views, self.has_grad, add=is_sum)
        self.state = GradientState.ACCUMULATING

    # over the ranks

    def reduce(self, *, at_step: bool) -> None:
        """Start to sum over the ranks what the parameters' gradients hold. ``wait`` completes it.

        Args:
            at_step: this is the last reduction before the optimizer's step.

        Communicates: what ``redistribute`` does from Partial to the row's placement between micro-batches, or at the
        step.
        """
        self.num_reductions += 1
        if self.is_whole and self.state is not GradientState.REDUCED:
            self._reduce_accumulator()
        else:
            self._reduce_staged(at_step=at_step)

    def _flat(self, full: torch.Tensor, shard: torch.Tensor | None) -> FlatBuffer:
        return FlatBuffer(self.buffer.label, self.axes, self.row.gradient, full, shard)

    def _reduce_accumulator(self) -> None:
        if self.state is GradientState.ACCUMULATING and self._has_new():
            self._widen()
        self._accumulate_whole()
        policy = self.policy
        flat, owned = self.accumulator.memory(), self.owned()
        sent = policy.reduce_dtype or self.dtype
        if policy.pre_scale != 1.0:
            flat.mul_(policy.pre_scale)
        self.state = GradientState.REDUCING
        if sent == self.dtype:
            self._work = self.accumulator.reader = self._redistribute(flat, owned)
            return
        staging = self._staging.acquire(self.layout, sent)
        staging.flat.copy_(flat)
        work = self._work = self._redistribute(staging.flat, owned)

        def after() -> None:
            if self._is_whole_at_step:
                flat.copy_(staging.flat)
            self._staging.release(self.layout, staging, work)

        self._after = after

    def _redistribute(self, full: torch.Tensor, shard: torch.Tensor, **how: Any) -> Work:
        to: Placement = how.pop("to", self.row.gradient_at_step)
        return self._flat(full, shard).redistribute(to, scale=self.policy.post_scale, **how)

    def _reduce_staged(self, *, at_step: bool) -> None:
        policy = self.policy
        if not at_step:
            self._widen()
        is_accumulator_sent = self.is_whole or self._unsynced.flat is not None
        sent = policy.reduce_dtype or (self.dtype if is_accumulator_sent else self.buffer.dtype)
        was_reduced = self.state is GradientState.REDUCED
        add = was_reduced or self.state is GradientState.ACCUMULATING
        staging = self._staging.acquire(self.layout, sent)
        if self._unsynced.flat is None:
            take_gradients(self.parameters, staging.views, self.has_grad, add=False)
        else:
            self._unsynced.add(self.parameters, self.has_grad, self.dtype)
            staging.flat.copy_(self._unsynced.memory(self.dtype))
            self._unsynced.drop()
        if policy.pre_scale != 1.0:
            staging.flat.mul_(policy.pre_scale)
        to = self.row.gradient_at_step if at_step or self.is_whole else self.row.gradient_between
        has_replicas = len(self.axes) > 1
        # What was summed over the replicas already must not be summed again: a late part has a shard of its own.
        has_own_shard = was_reduced and has_replicas and not self._is_whole_at_step
        is_added_on_host = self.accumulator.is_on_host and (was_reduced or not at_step or not has_replicas)
        owned = self.accumulator.new_part() if is_added_on_host else self.owned()
        target = torch.empty_like(owned) if has_own_shard and not is_added_on_host else owned
        self.state = GradientState.REDUCING
        accumulate = add and target is owned and not is_added_on_host and not self._is_whole_at_step
        work = self._work = self._redistribute(staging.flat, target, to=to, accumulate=accumulate)

        def after() -> None:
            if self._is_whole_at_step:
                owned.add_(staging.flat)
            self._staging.release(self.layout, staging, work)
            if target is not owned:
                owned.add_(target)

        self._after = after

    def wait(self, *, at_step: bool) -> None:
        """Wait for the reduction that was issued."""
        if self._work is None:
            return
        work = self._work
        work.wait()
        if self._after is not None:
            self._after()
        self._work, self._after = None, None
        is_sum = at_step or self.is_whole
        self.state = GradientState.REDUCED if is_sum else GradientState.ACCUMULATING
        if self.is_view and is_sum:
            work.drain()  # the script may scale what peers read

    def complete(self) -> None:
        """At the step: sum over the ranks what no pass has summed yet (accumulation whose end was not announced)."""
        if self.state is GradientState.REDUCED:
            return
        if self.is_whole:
            self.reduce(at_step=True)
            self.wait(at_step=True)
            return
        if self.state is GradientState.NONE:  # nothing was reduced: the memory may hold the last step's values
            self.num_reductions += 1
            self.accumulator.memory().zero_()
        if len(self.axes) > 1:
            self.num_reductions += 1
            owned = self.owned()
            shard = FlatBuffer(self.buffer.label, self.axes, self.row.gradient_between, owned, owned)
            shard.redistribute(self.row.gradient_at_step).wait()
        self.state = GradientState.REDUCED

    def norm_part(self) -> torch.Tensor:
        """What this rank adds to the global norm: its range, also where the whole is on every rank. 1-D."""
        owned = self.owned()
        comm = self.buffer.comm
        if self._is_whole_at_step and comm.size > 1:
            begin, end = self.layout.owned(comm.rank)
            owned = owned[begin:end]
        return owned

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        """Set this rank's part of one parameter's reduced gradient. ``values``: 1-D."""
        self.take_back()
        self.owned()[segment.start : segment.stop].copy_(values)
        self._show()

    def reset(self) -> None:
        """Drop the gradient of this step. The memory stays, unless it is offloaded or a view of the script's."""
        self._left = []
        if self._shown or self.adds_in_place:
            self._shown, self.is_attached = [], False
            for parameter in self.parameters:
                parameter.grad = None
        self.accumulator.forget_host()
        if self.accumulator.is_offloaded or self.is_view:
            self.accumulator.drop()
            self.accumulator.reader = None
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))
        self._work, self._after = None, None
        self._moved = None
        self._unsynced.drop()

    # as a view in parameter.grad

    def value(self, slot: int) -> torch.Tensor:
        """The sum for one parameter, in its shape: the memory itself, or a sparse tensor."""
        self.accumulator.memory()
        return self.accumulator.views[slot]

    def _replace(self, slot: int, value: torch.Tensor | None) -> None:
        """The script has set another gradient, or none."""
        view = self.value(slot)
        if value is None:
            view.zero_()
        else:
            view.copy_(value.to_dense() if value.is_sparse else value)

    def show(self) -> None:
        """A pass has ended: from now on ``parameter.grad`` is a view of the sum, where ``is_view``."""
        if not self.is_view:
            self._left = [parameter.grad for parameter in self.parameters]
        if not self.is_view or self.state is not GradientState.REDUCED:
            return
        if self._has_new() and self.buffer.comm.size == 1:  # arrived after the reduction
            self.reduce(at_step=True)
            self.wait(at_step=True)
        if not self._has_new():
            self._show()

    def assigned(self) -> list[str]:
        """Parameters whose ``.grad`` the script has set since the last pass, where it is no view of the sum."""
        if self.state is not GradientState.REDUCED or self.is_sparse:
            return []
        pairs = zip(self.parameters, self._left, self.layout.specs, strict=False)
        return [spec.name for p, left, spec in pairs if p.grad is not None and p.grad is not left]

    def _show(self) -> None:
        # torch refuses a gradient of another dtype than the parameter's.
        if not self.is_view or self.buffer.dtype != self.dtype or self.state is not GradientState.REDUCED:
            return
        self._shown = [self.value(slot) for slot in range(len(self.parameters))]
        for slot, (parameter, value) in enumerate(zip(self.parameters, self._shown, strict=True)):
            if self.has_grad[slot] or self.buffer.comm.size > 1:
                parameter.grad = value

    @torch.no_grad()
    def take_back(self) -> None:
        """A pass or the step begins: what ``parameter.grad`` holds now is the sum."""
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

    def sync_view(self) -> None:
        """Take over what the script has set in ``parameter.grad``."""
        if self._shown:
            self.take_back()
            self._show()

    def _leave_memory(self) -> None:
        """The script may keep what it has seen: the sum continues in other memory."""
        self.accumulator.move()

    # to and from a checkpoint

    def export(self) -> dict[str, Any] | None:
        """What is open between two passes, as nested values with tensors; None: nothing is."""
        if self._moved is not None:
            return self._moved
        self.take_back()
        gradients = {str(i): _dense(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}
        saved = None
        if self.state is not GradientState.NONE or self._unsynced.flat is not None or gradients:
            saved = {
                "is_wide": self.dtype == self._sum_dtype,
                "state": self.state.value,
                "touched": list(self.has_grad),
                "accumulator": None if self.state is GradientState.NONE else self.accumulator.memory(),
                "held": self._unsynced.flat,
                "gradients": gradients,
            }
        self._show()
        return saved

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set what ``export`` gave on the same rank of the same layout."""
        self.reset()
        if saved["is_wide"]:
            self._widen()
        if saved["accumulator"] is not None:
            self.accumulator.memory().copy_(saved["accumulator"])
        self.state = GradientState(saved["state"])
        self.has_grad = bytearray(saved["touched"])
        if saved["held"] is not None:
            self._unsynced.memory(self.dtype).copy_(saved["held"])
        for index, parameter in enumerate(self.parameters):
            value = saved["gradients"].get(str(index))
            parameter.grad = None if value is None else value.to(parameter.device, parameter.dtype)
        self._show()

    # in host memory for a while (``offload_states``)

    @property
    def is_moved(self) -> bool:
        """True if a gradient of the step under way is in host memory."""
        return self._moved is not None

    @property
    def nbytes_moved(self) -> int:
        """Bytes that are in host memory."""
        return sum(tensor.nbytes for tensor in _tensors_in(self._moved))

    def open_tensors(self) -> list[torch.Tensor]:
        """The tensors of the gradient of the step under way."""
        return _tensors_in(self.export())

    def move_to_host(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Free the device's memory; what is open is kept where ``to_host`` copies it. No peer reads it."""
        saved = self.export()
        copied = None if saved is None else _copied(saved, to_host)
        self.free()
        self._moved = copied

    def move_to_device(self) -> None:
        """Undo ``move_to_host``."""
        if self._moved is not None:
            self.restore(self._moved)

    def free(self) -> None:
        """Free all memory."""
        self.reset()
        self.accumulator.reader = None
        self.accumulator.drop()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return coalesced(gradient, gradient.dtype).to_dense() if gradient.is_sparse else gradient


def _copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(value)
    return {key: _copied(item, copy) for key, item in value.items()} if isinstance(value, dict) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in _tensors_in(item)] if isinstance(value, dict) else []
