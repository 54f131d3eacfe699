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

A gradient that arrives after its group was reduced stays in ``parameter.grad`` and joins the next reduction, at the
latest at the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from shoal.comm.protocol import Work
from shoal.memory.stream_copies import CopyDone
from shoal.sharding.buffer import Axis, FlatBuffer
from shoal.sharding.layout import Segment
from shoal.sharding.offloaded_sum import HostGradient, OffloadedSum
from shoal.sharding.sparse_sum import coalesced
from shoal.sharding.staging import StagingBuffers
from shoal.sharding.storage import DeviceStorage
from shoal.sharding.table import Row


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
        is_view: after the reduction ``parameter.grad`` is a view of the sum, in which the script may scale, replace or
            drop it (``gradient_as_bucket_view``). Needs the whole sum on this rank, in the parameter's dtype.

    Memory: a sum of the whole buffer where the gradient between micro-batches is Partial, else of this rank's range;
    from the first backward pass on (``is_view``: until the step; offloaded: until it has been copied to the host, in a
    buffer that groups share). While a group whose sum is a range is reduced, a staging buffer has the whole. In
    ``no_sync`` also a whole buffer of the sum's dtype, until the next reduction.
    """

    is_sparse = False  # True if it has the rows that were looked up, not the table

    def __init__(
        self,
        buffer: FlatBuffer,
        parameters: Sequence[torch.nn.Parameter],
        row: Row,
        policy: GradientPolicy,
        axes: Mapping[str, Axis],
        staging: StagingBuffers,
        sum_dtype: torch.dtype | None = None,
        *,
        is_view: bool = False,
    ) -> None:
        self.buffer = buffer
        self.layout = buffer.layout
        self.parameters = list(parameters)
        self.row = row
        self.policy = policy
        self.axes = axes
        self.is_view = is_view
        self.adds_in_place = False  # autograd adds later micro-batches into the sum: ``parameter.grad`` is a view of it
        self.is_attached = False  # True if every ``parameter.grad`` is such a view
        self.offloaded: OffloadedSum | None = None  # set where the sum moves to the host whenever it was reduced into
        dtype = policy.accumulate_dtype or buffer.dtype
        self._sum_dtype = sum_dtype or dtype
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))  # a gradient arrived on this rank since the last step
        self.num_reductions = 0  # ever begun: distinguishes one step's gradient from the next one's
        self._staging = staging
        staging.register(self.layout)
        self.is_alone = buffer.comm.size == 1 and len(axes) == 1  # True if there is one rank
        between = row.gradient if self.is_alone else row.gradient_between
        self.sum = FlatBuffer(
            buffer.label, self.layout, dtype, buffer.device, buffer.comm, axes, between, owned=buffer.owned
        )
        self.unsynced = FlatBuffer(
            buffer.label, self.layout, dtype, buffer.device, buffer.comm, axes, row.gradient, owned=buffer.owned
        )
        self.is_whole = not between.is_sharded  # True if the sum is the whole buffer
        self._is_whole_at_step = not row.gradient_at_step.is_sharded
        self._shown: list[torch.Tensor] = []  # by parameter, what ``.grad`` was set to
        self._left: list[torch.Tensor | None] = []  # by parameter, the ``.grad`` that the last pass left; not views
        self._work: Work | None = None
        self._after: Callable[[], None] | None = None
        self._moved: dict[str, Any] | None = None  # what ``export`` gave, while ``offload_states`` has it

    # memory

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return self.sum.dtype

    @property
    def _present(self) -> torch.Tensor | None:
        """The sum on the device; None: there is no memory of it."""
        flat = self.sum.full if self.is_whole else self.sum.shard
        return flat if flat.numel() else None

    def memory(self, *, is_overwritten: bool = False) -> torch.Tensor:
        """The sum, on the device; allocated at the first call, with zeros unless every parameter is overwritten now."""
        self._fetch()
        flat = self._present
        if flat is None:
            total, numel = self.sum, self.layout.numel if self.is_whole else self.sum.owned_numel
            if self.is_whole:
                flat = total.comm.empty(numel, total.dtype, total.device)
                total.set_full(flat)
            else:
                if self.offloaded is None:
                    flat = torch.empty(numel, dtype=total.dtype, device=total.device)
                else:
                    flat = self.offloaded.acquire(numel, total.dtype)
                total.storage = DeviceStorage(flat)
            if not is_overwritten or self.layout.parameter_numel < numel:  # with gaps, which stay zero
                flat.zero_()
        return flat

    def _fetch(self) -> None:
        """Fetch a sum that is on the host alone."""
        fetched = None if self.offloaded is None else self.offloaded.fetch()
        if fetched is not None:
            self.sum.storage = DeviceStorage(fetched)

    def _drop_memory(self) -> None:
        if self.offloaded is not None:
            self.offloaded.discard(self._present)
        self.sum.drop()

    @property
    def version(self) -> tuple[int, int]:
        """Changes with the values: the number of reductions, and the version counter of the memory."""
        offloaded = self.offloaded
        if offloaded is None:
            return self.num_reductions, self.owned()._version
        version = self.owned()._version if offloaded.version is None else offloaded.version
        return self.num_reductions + offloaded.num_fetches, version

    @property
    def offloaded_norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of a sum that is on the host; None: it is on the device."""
        return None if self.offloaded is None else self.offloaded.norm_squared

    def offload_sum(self) -> None:
        """From now on the sum moves to the host whenever it was reduced into, unless it is the whole buffer."""
        if not self.is_whole:
            self.offloaded = OffloadedSum(self._staging.shards, self.buffer.device)

    def offload(self, host: HostGradient, copied: CopyDone, *, is_for_step: bool) -> None:
        """Free the device's memory of the sum, or of what was reduced last: the host has it. See ``OffloadedSum``."""
        assert self.offloaded is not None
        is_part = self.offloaded.part is not None
        self.offloaded.store(self.sum.shard if is_part else self.memory(), host, copied, is_for_step=is_for_step)
        self.sum.drop()

    def owned(self) -> torch.Tensor:
        """The range of the reduced gradient that this rank's optimizer reads. Shape: [owned numel]."""
        flat = self.memory()
        return self.sum.shard if self.is_whole and not self._is_whole_at_step else flat

    @property
    def nbytes_unsynced(self) -> int:
        """Bytes of the gradients of passes in ``no_sync``."""
        return self.unsynced.full.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the sum has, or will have."""
        return self.sum.nbytes_stored

    def _widen(self) -> None:
        """Several micro-batches are added up: from now on in the dtype of sums."""
        if self.dtype == self._sum_dtype:
            return
        self._fetch()
        self.sum.dtype = self._sum_dtype
        self.sum.wait_for_reader()
        narrow = self._present
        self._drop_memory()
        if narrow is not None and self.state is not GradientState.NONE:
            self.memory().copy_(narrow)

    # from parameter.grad

    def has_unreduced(self) -> bool:
        """True if there is a gradient that no reduction has seen."""
        return self.unsynced.has_memory or self._has_new()

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

        Where the sum is a range they are kept whole on this rank; where it has the parameters' dtype, autograd adds
        them up in ``parameter.grad``. So do gradients that arrive after the reduction.
        """
        if self.is_attached or not self._has_new() or (self.state is GradientState.REDUCED and self.is_whole):
            return
        if not self.is_whole:
            if self._sum_dtype != self.buffer.dtype:
                self._widen()
                self._add_unsynced()
            return
        if self.state is GradientState.ACCUMULATING:
            self._widen()
        self._accumulate_whole()
        if self.adds_in_place and self.dtype == self._sum_dtype == self.buffer.dtype:
            for parameter, view, has_grad in zip(self.parameters, self.sum.views, self.has_grad, strict=True):
                parameter.grad = view if has_grad else None
            self.is_attached = all(self.has_grad)

    def _accumulate_whole(self) -> None:
        self.is_attached = False
        is_sum = self.state is GradientState.ACCUMULATING
        self.memory(is_overwritten=not is_sum)
        self.sum.wait_for_reader()
        self.sum.assume(self.row.gradient)
        take_gradients(self.parameters, self.sum.views, self.has_grad, add=is_sum)
        self.state = GradientState.ACCUMULATING

    def _allocate_unsynced(self) -> FlatBuffer:
        unsynced = self.unsynced
        if not unsynced.has_memory:
            unsynced.dtype = self.dtype
            unsynced.set_full(torch.zeros(self.layout.numel, dtype=self.dtype, device=unsynced.device))
        return unsynced

    def _add_unsynced(self) -> None:
        take_gradients(self.parameters, self._allocate_unsynced().views, self.has_grad, add=True)

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
            self._reduce_sum()
        else:
            self._reduce_staged(at_step=at_step)

    def _reduce_sum(self) -> None:
        if self.state is GradientState.ACCUMULATING and self._has_new():
            self._widen()
        self._accumulate_whole()
        policy, to = self.policy, self.row.gradient_at_step
        flat = self.sum.full
        sent = policy.reduce_dtype or self.dtype
        if policy.pre_scale != 1.0:
            flat.mul_(policy.pre_scale)
        self.state = GradientState.REDUCING
        if sent == self.dtype:
            self._work = self.sum.reader = self.sum.redistribute(to, scale=policy.post_scale)
            return
        staging = self._acquire(sent)
        staging.full.copy_(flat)
        work = self._work = staging.redistribute(to, into=self.owned(), scale=policy.post_scale)
        self.sum.assume(to)

        def after() -> None:
            if self._is_whole_at_step:
                flat.copy_(staging.full)
            self._staging.release(staging, work)

        self._after = after

    def _acquire(self, dtype: torch.dtype) -> FlatBuffer:
        """A staging buffer of this gradient."""
        staging = self._staging.acquire(self.layout, dtype)
        staging.label, staging.axes = self.buffer.label, self.axes
        staging.assume(self.row.gradient)
        return staging

    def _reduce_staged(self, *, at_step: bool) -> None:
        policy = self.policy
        if not at_step:
            self._widen()
        is_sum_sent = self.is_whole or self.unsynced.has_memory
        sent = policy.reduce_dtype or (self.dtype if is_sum_sent else self.buffer.dtype)
        was_reduced = self.state is GradientState.REDUCED
        add = was_reduced or self.state is GradientState.ACCUMULATING
        staging = self._acquire(sent)
        if self.unsynced.has_memory:
            self._add_unsynced()
            staging.full.copy_(self.unsynced.full)
            self.unsynced.drop()
        else:
            take_gradients(self.parameters, staging.views, self.has_grad, add=False)
        if policy.pre_scale != 1.0:
            staging.full.mul_(policy.pre_scale)
        to = self.row.gradient_at_step if at_step or self.is_whole else self.row.gradient_between
        has_replicas = len(self.axes) > 1
        # What was summed over the replicas already must not be summed again: a late part has a shard of its own.
        has_own_shard = was_reduced and has_replicas and not self._is_whole_at_step
        offloaded = self.offloaded
        is_on_host = offloaded is not None and offloaded.is_on_host
        is_added_on_host = is_on_host and (was_reduced or not at_step or not has_replicas)
        if offloaded is not None and is_added_on_host:
            owned = offloaded.acquire_part(self.sum.owned_numel, self.dtype)
        else:
            owned = self.owned()
        target = torch.empty_like(owned) if has_own_shard and not is_added_on_host else owned
        self.state = GradientState.REDUCING
        accumulate = add and target is owned and not is_added_on_host and not self._is_whole_at_step
        work = staging.redistribute(to, into=target, scale=policy.post_scale, accumulate=accumulate)
        self._work = work
        self.sum.assume(to)

        def after() -> None:
            if self._is_whole_at_step:
                owned.add_(staging.full)
            self._staging.release(staging, work)
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
            self.memory().zero_()
        if len(self.axes) > 1:
            self.num_reductions += 1
            self.memory()
            self.sum.assume(self.row.gradient_between)
            self.sum.redistribute(self.row.gradient_at_step).wait()
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
        if self.offloaded is not None:
            self.offloaded.forget()
        if self.offloaded is not None or self.is_view:
            self._drop_memory()
            self.sum.reader = None
        self.state = GradientState.NONE
        self.has_grad = bytearray(len(self.parameters))
        self._work, self._after = None, None
        self._moved = None
        self.unsynced.drop()

    # as a view in parameter.grad

    def value(self, slot: int) -> torch.Tensor:
        """The sum for one parameter, in its shape: the memory itself, or a sparse tensor."""
        self.memory()
        return self.sum.views[slot]

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
        flat = self._present
        if flat is not None:
            self.sum.drop()
            self.memory().copy_(flat)

    # to and from a checkpoint

    def export(self) -> dict[str, Any] | None:
        """What is open between two passes, as nested values with tensors; None: nothing is."""
        if self._moved is not None:
            return self._moved
        self.take_back()
        gradients = {str(i): _dense(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}
        saved = None
        if self.state is not GradientState.NONE or self.unsynced.has_memory or gradients:
            saved = {
                "is_wide": self.dtype == self._sum_dtype,
                "state": self.state.value,
                "touched": list(self.has_grad),
                "accumulator": None if self.state is GradientState.NONE else self.memory(),
                "held": self.unsynced.full if self.unsynced.has_memory else None,
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
            self.memory().copy_(saved["accumulator"])
        self.state = GradientState(saved["state"])
        self.has_grad = bytearray(saved["touched"])
        if saved["held"] is not None:
            self._allocate_unsynced().full.copy_(saved["held"])
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
        self.sum.reader = None
        self._drop_memory()


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
