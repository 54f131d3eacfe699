"""From a parameter's gradient to the reduced gradient of a unit.

A unit is reduced when each of its parameters has its gradient; what is still open when backward ends is reduced then,
with zeros where a parameter got none. Reductions are issued in one order, the same on every rank, so ranks whose
branches differ neither hang nor mix. A gradient that comes after its unit was reduced stays in ``parameter.grad`` and
joins the unit's next reduction, at the latest at the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.memory.bucket import ParameterBucket
from shoal.memory.layout import Segment
from shoal.memory.placement import Kind
from shoal.memory.pool import Pool
from shoal.zero.sparse import summed
from shoal.zero.table import Row

NORM_BLOCK_NUMEL = 1 << 17  # 512 KiB of fp32


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
            that of the master weights.
        wire_dtype: of what is sent; None: the accumulator's where that is sent, else the parameter's.
        pre_scale: factor before the sum over ranks; ``post_scale``: after it.
    """

    accumulate_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    pre_scale: float = 1.0
    post_scale: float = 1.0


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a 1-D tensor, in fp32 (fp64 for fp64). Shape: [].

    A 16-bit tensor on CPU is converted block by block, in cache: a norm that converts as it reads takes twice as long.
    """
    if flat.device.type != "cpu" or flat.dtype not in (torch.float16, torch.bfloat16):
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    else:
        parts = [torch.linalg.vector_norm(block.float()) for block in flat.split(NORM_BLOCK_NUMEL)]
        norm = torch.linalg.vector_norm(torch.stack(parts))
    return norm * norm


class Sums(Protocol):
    """What sums a bucket over the ranks of one axis: a ``Communicator``, or ``RowSum``."""

    rank: int
    size: int

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...
    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work: ...
    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work: ...


class BucketGradient:
    """The gradient of one bucket.

    Args:
        sum_dtype: what the accumulator is widened to when a second micro-batch is added; None: it stays as it is.

    Memory: an accumulator of the whole bucket where the row says Partial, else of this rank's range; from the first
    backward pass on. While a unit whose accumulator is sharded is being reduced, a slab of the pool holds the whole.
    Between passes without communication a whole-sized tensor of the sum's dtype holds their sum, until the next
    reduction.
    """

    is_native = False  # does the optimizer read ``parameter.grad`` itself?
    is_watched = True  # do hooks tell when a parameter has its gradient?
    has_own_pieces = False  # does the optimizer step each parameter by itself?
    keeps_rows = False  # is it a table's, of which only the rows that were looked up are held?

    def __init__(
        self,
        bucket: ParameterBucket,
        row: Row,
        policy: GradientPolicy,
        inner: Sums,
        outer: Communicator | None,
        pool: Pool,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self.bucket = bucket
        self.layout = bucket.layout
        self.parameters = bucket.parameters
        self.policy = policy
        self.dtype = policy.accumulate_dtype or bucket.dtype
        self._sum_dtype = sum_dtype or self.dtype
        self.state = GradientState.NONE
        self.touched = bytearray(len(self.parameters))  # got a gradient on this rank since the last step
        self.num_reductions = 0  # ever begun: tells one step's gradient from the next one's
        self._inner = inner
        self.outer = outer if outer is not None and outer.size > 1 else None
        self._pool = pool
        pool.expect(bucket.layout)
        self._is_whole_between = row.gradient_between.inner is not Kind.SHARD
        self._is_whole_at_step = row.gradient_at_step.inner is Kind.REPLICATE
        self._accumulator: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._held: torch.Tensor | None = None  # [numel] whole, of passes that no reduction has seen
        self._held_views: list[torch.Tensor] = []
        self._work: Work | None = None
        self._reader: Work | None = None  # the last collective that peers read the accumulator for
        self._after: Callable[[], None] | None = None
        self._moved: dict[str, Any] | None = None  # what ``export`` gave, while it rests elsewhere
        self.rests_apart = False  # a sharded accumulator leaves the device whenever it has been reduced into
        self._parked: Callable[[], torch.Tensor] | None = None  # gives the accumulator that has left
        self._parked_version = 0
        self._parked_norm: torch.Tensor | None = None

    # memory

    def park(self, fetch: Callable[[], torch.Tensor], *, is_for_step: bool) -> None:
        """Give the accumulator's device memory back: its values are elsewhere now. Who needs them here has them again.

        Args:
            fetch: gives the values; may block the host.
            is_for_step: the norm will be asked for, so it is taken now.
        """
        owned = self.owned()
        self._parked_norm = sum_of_squares(owned) if is_for_step else None
        self._parked_version = owned._version
        self._parked, self._accumulator = fetch, None

    @property
    def mark(self) -> tuple[int, int]:
        """Which values these are: how often they were reduced or brought back, and their memory's version."""
        return self.num_reductions, self._parked_version if self._parked is not None else self.owned()._version

    def _bring_back(self) -> None:
        if self._parked is not None:
            fetch, self._parked = self._parked, None
            self._accumulator = fetch().to(self.bucket.full.device, copy=True)
            self.num_reductions += 1  # they may be changed from now on

    def accumulator(self) -> torch.Tensor:
        """The accumulator, allocated at the first call."""
        self._bring_back()
        if self._accumulator is None:
            layout = self.layout
            if self._is_whole_between:
                flat = self._inner.empty(layout.numel, self.dtype, self.bucket.full.device)
                self._views = [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots]
            else:
                begin, end = self.bucket.begin, self.bucket.end
                flat = torch.empty(end - begin, dtype=self.dtype, device=self.bucket.full.device)
            flat.zero_()
            self._accumulator = flat
        return self._accumulator

    def owned(self) -> torch.Tensor:
        """The range of the reduced gradient that this rank's optimizer reads. Shape: [owned numel]."""
        whole = self.accumulator()
        if self._is_whole_between and not self._is_whole_at_step:
            return whole[self.bucket.begin : self.bucket.end]
        return whole

    @property
    def is_whole_between(self) -> bool:
        """Is the accumulator the whole bucket's, not this rank's range?"""
        return self._is_whole_between

    @property
    def nbytes(self) -> int:
        """Bytes that the accumulator holds, or will."""
        numel = self.layout.numel if self._is_whole_between else self.bucket.end - self.bucket.begin
        return numel * torch.empty((), dtype=self.dtype).element_size()

    @property
    def nbytes_held(self) -> int:
        """Bytes of what passes without communication left."""
        return 0 if self._held is None else self._held.nbytes

    def _widen(self) -> None:
        """Several micro-batches are added up: from now on in the dtype that such sums have."""
        if self.dtype == self._sum_dtype:
            return
        self._bring_back()
        self.dtype = self._sum_dtype
        if self._reader is not None:
            self._reader.drain()
            self._reader = None
        narrow, self._accumulator, self._views = self._accumulator, None, []
        if narrow is not None and self.state is not GradientState.NONE:
            self.accumulator().copy_(narrow)

    # from parameter.grad

    def _take(self, views: Sequence[torch.Tensor], *, add: bool) -> None:
        """Move the gradients into ``views``: add them, or copy them and zero what got none."""
        targets, gradients = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            gradient = parameter.grad
            if gradient is not None:
                self.touched[index] = 1
                parameter.grad = None
                if gradient.is_sparse:
                    _take_sparse(view, gradient, add=add)
                    continue
                targets.append(view)
                gradients.append(gradient)
            elif not add:
                view.zero_()
        if targets and add:
            torch._foreach_add_(targets, gradients)
        elif targets:
            torch._foreach_copy_(targets, gradients)

    def has_new(self) -> bool:
        """Is there a gradient that no reduction has seen?"""
        return self._held is not None or self._has_unmoved()

    def _has_unmoved(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def accumulate(self) -> None:
        """Add the parameters' gradients to the whole accumulator, without communication.

        Once it holds the sum over the ranks, they stay where they are until the next reduction.
        """
        if self.state is GradientState.REDUCED:
            return
        if self.state is GradientState.ACCUMULATING and self._has_unmoved():
            self._widen()
        self.accumulator()
        if self._reader is not None:
            # Only this one: draining the whole axis would hold every unit up for the slowest rank.
            self._reader.drain()
            self._reader = None
        self._take(self._views, add=self.state is GradientState.ACCUMULATING)
        self.state = GradientState.ACCUMULATING

    def hold(self) -> None:
        """Where the accumulator is sharded: keep the gradients whole on this rank until the next reduction.

        What has the parameters' dtype is left to autograd, which adds up in ``parameter.grad``.
        """
        if self._sum_dtype == self.bucket.dtype or not self._has_unmoved():
            return
        self._widen()
        self._hold_room()
        self._take(self._held_views, add=True)

    def _hold_room(self) -> torch.Tensor:
        if self._held is None:
            layout = self.layout
            self._held = torch.zeros(layout.numel, dtype=self.dtype, device=self.bucket.full.device)
            self._held_views = [self._held[s.offset : s.offset + s.numel].view(s.shape) for s in layout.slots]
        return self._held

    # over the ranks

    def start_reduce(self, *, at_step: bool) -> None:
        """Issue the reduction of what the parameters' gradients hold.

        Args:
            at_step: this is the last reduction before the optimizer's step: the outer axis is summed too.

        Communicates: Partial -> Shard: one reduce_scatter; Partial -> Replicate: one all_reduce; with an outer axis
        one all_reduce of the shard.
        """
        self.num_reductions += 1
        if self._is_whole_between and self.state is not GradientState.REDUCED:
            self._reduce_accumulator()
        else:
            self._reduce_slab(at_step=at_step)

    def _reduce_accumulator(self) -> None:
        self.accumulate()
        policy, label = self.policy, self.bucket.label
        flat = self.accumulator()
        wire = policy.wire_dtype or self.dtype
        if policy.pre_scale != 1.0:
            flat.mul_(policy.pre_scale)
        owned = self.owned()
        self.state = GradientState.REDUCING
        if wire == self.dtype:
            if self._is_whole_at_step:
                self._work = self._inner.all_reduce(flat, scale=policy.post_scale, label=label)
            else:
                self._work = self._inner.reduce_scatter(flat, owned, scale=policy.post_scale, label=label)
            self._reader = self._work
            self._after = self._sum_outer(owned)
            return
        slab = self._pool.take(self.layout, wire)
        slab.flat.copy_(flat)
        if self._is_whole_at_step:
            work = self._inner.all_reduce(slab.flat, scale=policy.post_scale, label=label)
        else:
            work = self._inner.reduce_scatter(slab.flat, owned, scale=policy.post_scale, label=label)
        self._work = work
        outer = self._sum_outer(owned)

        def after() -> None:
            if self._is_whole_at_step:
                flat.copy_(slab.flat)
            self._pool.give_back(self.layout, slab, work)
            if outer is not None:
                outer()

        self._after = after

    def _reduce_slab(self, *, at_step: bool) -> None:
        policy, label = self.policy, self.bucket.label
        if not at_step:
            self._widen()
        is_accumulator_sent = self._is_whole_between or self._held is not None
        wire = policy.wire_dtype or (self.dtype if is_accumulator_sent else self.bucket.dtype)
        add = self.state in (GradientState.ACCUMULATING, GradientState.REDUCED)
        was_reduced = self.state is GradientState.REDUCED
        slab = self._pool.take(self.layout, wire)
        if self._held is None:
            self._take(slab.views, add=False)
        else:
            self._take(self._held_views, add=True)
            slab.flat.copy_(self._held)
            self._drop_held()
        if policy.pre_scale != 1.0:
            slab.flat.mul_(policy.pre_scale)
        owned = self.owned()
        self.state = GradientState.REDUCING
        # What was reduced over the outer axis already must not be summed over it again: a late part goes through a
        # shard of its own.
        late = torch.empty_like(owned) if was_reduced and self.outer is not None else None
        if self._is_whole_at_step:
            work = self._inner.all_reduce(slab.flat, scale=policy.post_scale, label=label)
        elif late is not None:
            work = self._inner.reduce_scatter(slab.flat, late, scale=policy.post_scale, label=label)
        else:
            work = self._inner.reduce_scatter(slab.flat, owned, scale=policy.post_scale, accumulate=add, label=label)
        self._work = work
        outer = self._sum_outer(late if late is not None else owned) if at_step else None

        def after() -> None:
            if self._is_whole_at_step:
                owned.add_(slab.flat)
            self._pool.give_back(self.layout, slab, work)
            if outer is not None:
                outer()
            if late is not None:
                owned.add_(late)

        self._after = after

    def _sum_outer(self, shard: torch.Tensor) -> Callable[[], None] | None:
        outer = self.outer
        if outer is None:
            return None
        return lambda: outer.all_reduce(shard, label=self.bucket.label).drain()

    def settle(self, *, at_step: bool) -> None:
        """Wait for the reduction that was issued."""
        if self._work is None:
            return
        self._work.wait()
        if self._after is not None:
            self._after()
        self._work, self._after = None, None
        is_sum = at_step or self._is_whole_between
        self.state = GradientState.REDUCED if is_sum else GradientState.ACCUMULATING

    def complete(self) -> None:
        """At the step: sum over the ranks what no pass has summed yet.

        That is accumulation whose end the engine was not told.
        """
        if self._is_whole_between:
            self.start_reduce(at_step=True)
            self.settle(at_step=True)
            return
        self.num_reductions += 1
        if self.state is GradientState.NONE:  # nothing was reduced: there may be the last step's values
            self.accumulator().zero_()
        outer = self._sum_outer(self.owned())
        if outer is not None:
            outer()
        self.state = GradientState.REDUCED

    def norm_squared(self) -> torch.Tensor:
        """Sum of squares of this rank's range, whether or not the whole is here. Shape: [], fp32."""
        if self._parked is not None and self._parked_norm is not None:
            return self._parked_norm
        owned = self.owned()
        if self._is_whole_at_step and self._inner.size > 1:
            begin, end = self.layout.owned(self._inner.rank)
            owned = owned[begin:end]
        return sum_of_squares(owned)

    def part(self, start: int, stop: int, segments: Sequence[Segment]) -> torch.Tensor:
        """Elements ``[start, stop)`` of the owned range, which hold ``segments``."""
        return self.owned()[start:stop]

    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        """Set the part of one parameter's reduced gradient that is this rank's. ``values``: 1-D."""
        self.owned()[segment.start : segment.stop].copy_(values)

    def take_back(self) -> None:
        """A pass or a step begins: what parameters show of the sum in ``.grad`` is taken off them."""

    def reset(self) -> None:
        """Forget the gradient of this step; the memory stays, unless it ``rests_apart``."""
        self._parked = self._parked_norm = None
        if self.rests_apart:
            self._accumulator = None
        self.state = GradientState.NONE
        self.touched = bytearray(len(self.parameters))
        self._work, self._after = None, None
        self._moved = None
        self._drop_held()

    def _drop_held(self) -> None:
        self._held, self._held_views = None, []

    # to and from a checkpoint

    def export(self) -> dict[str, Any] | None:
        """What is open between two passes, as nested values with tensors; None: nothing is."""
        if self._moved is not None:
            return self._moved
        gradients = {str(i): _dense(p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}
        if self.state is GradientState.NONE and self._held is None and not gradients:
            return None
        return {
            "is_wide": self.dtype == self._sum_dtype,
            "state": self.state.value,
            "touched": list(self.touched),
            "accumulator": None if self.state is GradientState.NONE else self.accumulator(),
            "held": self._held,
            "gradients": gradients,
        }

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set what ``export`` gave on the same rank of the same layout."""
        self.reset()
        if saved["is_wide"]:
            self._widen()
        if saved["accumulator"] is not None:
            self.accumulator().copy_(saved["accumulator"])
        self.state = GradientState(saved["state"])
        self.touched = bytearray(saved["touched"])
        if saved["held"] is not None:
            self._hold_room().copy_(saved["held"])
        for index, parameter in enumerate(self.parameters):
            value = saved["gradients"].get(str(index))
            parameter.grad = None if value is None else value.to(parameter.device, parameter.dtype)

    # elsewhere for a while

    @property
    def is_moved(self) -> bool:
        """Does a gradient of the step under way rest elsewhere?"""
        return self._moved is not None

    @property
    def nbytes_moved(self) -> int:
        """Bytes that rest elsewhere."""
        return sum(tensor.nbytes for tensor in _tensors_in(self._moved))

    def open_tensors(self) -> list[torch.Tensor]:
        """The tensors of a gradient that a step under way has so far."""
        return _tensors_in(self.export())

    def move_to_host(self, to_host: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give the device's memory back; what is open is kept where ``to_host`` copies it. No peer may read it now."""
        saved = self.export()
        copied = None if saved is None else _copied(saved, to_host)
        self.free()
        self._moved = copied

    def move_to_device(self) -> None:
        """Undo ``move_to_host``."""
        if self._moved is not None:
            self.restore(self._moved)

    def free(self) -> None:
        self.reset()
        self._reader = None
        self._accumulator, self._views = None, []


def _take_sparse(view: torch.Tensor, gradient: torch.Tensor, *, add: bool) -> None:
    if not add:
        view.zero_()
    view.add_(summed(gradient, view.dtype))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return summed(gradient, gradient.dtype).to_dense() if gradient.is_sparse else gradient


def _copied(value: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copy(value)
    return {key: _copied(item, copy) for key, item in value.items()} if isinstance(value, dict) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in _tensors_in(item)] if isinstance(value, dict) else []
