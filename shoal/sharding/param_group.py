"""A parameter group: parameters that share dtype, trainability and mesh axes, and everything that belongs to them.

    parameters   ``buffer``      the flat parameter buffer: sharded or whole, on its tier
                 ``second``      the shard of a second, narrower sharding that backward gathers from (ZeRO++ hpZ)
    gradients    ``gradient``    the buffer of the sum, and the reduction over the ranks
    main         ``main``        this rank's range of the main parameters: what the optimizer updates
    state        ``ranges``      the ranges that the optimizer updates as one tensor, with the optimizer state of each

A frozen group has parameters only. Each parameter is a view of its buffer. Reading a view of an emptied storage would
crash the process, so the data of a sharded parameter is a placeholder: one NaN expanded to the true shape (4 bytes,
reads as NaN, refuses writes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from shoal.comm.protocol import FinishedWork, Work
from shoal.comm.wire import Wire
from shoal.sharding.axes import GroupAxes
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.encoded_state import EncodedState, StateFormat, decoded, encoded, is_elementwise
from shoal.sharding.gradient import Gradient
from shoal.sharding.layout import Segment, Used
from shoal.sharding.placement import Placement
from shoal.sharding.second_shard import SecondShard
from shoal.sharding.sent_gradient import KeptState
from shoal.sharding.storage import placeholder
from shoal.sharding.table import Row
from shoal.streams import keep_for_current_stream


@dataclass(eq=False)
class ParameterRange:
    """A range of a group's main parameters that the optimizer updates as one tensor."""

    param: torch.nn.Parameter  # 1-D view of the main parameters
    group: int  # index of the optimizer's parameter group
    start: int  # in the owned range
    stop: int
    segments: tuple[Segment, ...]


class Updates(Protocol):
    """What updates a group on the host, while the device works (the CPU optimizer)."""

    def send_gradient(self, group: ParameterGroup, *, at_step: bool) -> None:
        """The group's gradient was reduced: start to copy it to the host."""
        ...

    def finish(self, group: ParameterGroup) -> None:
        """Wait for the group's update, and start to copy its parameters to where they are stored."""
        ...

    def synchronize(self, group: ParameterGroup) -> None:
        """As ``finish``; also undo an update that ran ahead of the step."""
        ...

    def parameters_of(self, group: ParameterGroup) -> torch.Tensor:
        """What the group's parameters are rounded from. Shape: [owned numel]."""
        ...


class DiskState(Protocol):
    """Where a group's main parameters and optimizer state are stored on a disk."""

    def resident(self, group: ParameterGroup) -> AbstractContextManager[None]:
        """Keep them in memory inside the block; changes are stored."""
        ...

    def fetch(self, group: ParameterGroup, *, reads_ahead: bool = False) -> None:
        """Read them into memory; begin to read the next group's."""
        ...

    def start_fetch(self, group: ParameterGroup) -> None:
        """Begin to read them. Does not block the host."""
        ...

    def store(self, group: ParameterGroup) -> None:
        """Begin to store them; placeholders are left in memory."""
        ...


class ParameterGroup:
    """See the module.

    Args:
        row: where each kind of state is stored.
        axes: the ranks that it is sharded, copied and summed over.
        parameters: one for each spec of the buffer's layout.
        second: of a second sharding, which backward gathers from; None: there is none.
        main_buffer: of the main parameters; ``buffer`` itself where they are the parameters; None: the group is frozen.
        is_state_offloaded: main parameters and optimizer state are in memory that the device does not compute in.
    """

    def __init__(
        self,
        row: Row,
        axes: GroupAxes,
        buffer: FlatBuffer,
        parameters: Sequence[torch.nn.Parameter],
        gradient: Gradient | None = None,
        main_buffer: FlatBuffer | None = None,
        *,
        second: SecondShard | None = None,
        is_state_offloaded: bool = False,
    ) -> None:
        self.row = row
        self.axes = axes
        self.buffer = buffer
        self.second = second
        self.parameters = list(parameters)
        self._gradient = gradient
        self._main_buffer = main_buffer
        self.has_own_main = main_buffer is not None and main_buffer is not buffer  # else they are the parameters
        self.is_state_offloaded = is_state_offloaded
        self._wires = None if row.sent.gather is None else {axes.shard: Wire(row.sent.gather)}
        self._base: torch.Tensor | None = None  # before an update, what every rank has of this rank's range
        self.kept: list[KeptState] = [] if gradient is None else [gradient.sent]
        self.ranges: list[ParameterRange] = []
        self.optimizer: torch.optim.Optimizer | None = None  # that keeps the state of ``ranges``, by their ``param``
        self.state_format: StateFormat | None = None  # of that state; None: tensors
        self._num_readers = 0  # in ``resident``
        self.updates: Updates | None = None  # set where the CPU optimizer updates the group
        self.disk: DiskState | None = None  # set where main parameters and optimizer state are on a disk
        self.before_change: Callable[[], None] | None = None  # waits for an asynchronous save that reads the state

    def __repr__(self) -> str:
        return f"ParameterGroup({self.label!r})"

    @property
    def label(self) -> str:
        return self.buffer.label

    @property
    def is_trained(self) -> bool:
        return self._gradient is not None

    @property
    def gradient(self) -> Gradient:
        assert self._gradient is not None, f"{self.label} is frozen"
        return self._gradient

    @property
    def main(self) -> torch.Tensor:
        """This rank's owned range of the main parameters. Shape: [owned numel]."""
        assert self._main_buffer is not None, f"{self.label} is frozen"
        return self._main_buffer.shard

    @main.setter
    def main(self, values: torch.Tensor) -> None:
        assert self._main_buffer is not None, f"{self.label} is frozen"
        self._main_buffer.storage.values = values

    def buffers(self) -> Iterator[tuple[str, FlatBuffer]]:
        """Each buffer of the group once, with its kind as in the ledger."""
        yield "parameter", self.buffer
        if self.second is not None:
            yield "gathered", self.second
        if self._gradient is not None:
            yield "gradient", self._gradient.sum
            yield "gradient", self._gradient.unsynced
        yield from ((kept.kind, buffer) for kept in self.kept for buffer in kept.buffers)
        if self._main_buffer is not None and self.has_own_main:
            yield "master", self._main_buffer

    @property
    def owned_numel(self) -> int:
        """Elements of this rank's range, padding included."""
        return self.buffer.owned_numel

    # parameters

    def gather(self, *, from_second: bool = False, used: Used | None = None, is_exact: bool = False) -> Work:
        """Shard -> Replicate. The parameters may be read after ``Work.wait()`` and ``attach_views()``.

        Args:
            from_second: from the second sharding, if a forward pass has kept it.
            used: which blocks of the parameters; others are NaN. None: all.
            is_exact: the values as they are stored, whatever format the row has for a gather.

        Communicates: one all-gather on the axis that shards (``from_second``: on that of the second sharding); of
            blocks, one of the rank's largest part of them, if that is less.
        Memory: the whole buffer on the device until ``release()``.
        """
        ranges = self.buffer.layout.ranges_of(used)
        if from_second and self.second is not None and self.second.is_kept and ranges is None:
            return self.second.gather()
        return self.buffer.redistribute(Placement(), ranges=ranges, wire=None if is_exact else self._wires)

    def release(self, *, keep_user_views: bool = False) -> None:
        """Replicate -> Shard: the parameters become placeholders, the whole buffer is freed. Communicates nothing.

        Args:
            keep_user_views: what the user has made of the parameters without a copy stays valid.
        """
        self.hide()
        self.buffer.release(keep_user_views=keep_user_views)
        if self.second is not None:
            self.second.assume(self.second.stored)

    def begin_update(self) -> None:
        """The optimizer is about to update: wait for readers; note the parameters, where differences will be sent."""
        self.wait_for_readers()
        if self.row.sent.is_difference:
            self._base = self.buffer.shard.clone()

    def update_replicas(self, *, is_exact: bool = False) -> Work:
        """After the optimizer has updated this rank's range of the whole buffer: bring all ranges up to date.

        Args:
            is_exact: the values as they are stored, whatever format the row has. So are those of frozen parameters, of
                which there are no others, and differences without ``begin_update()``, which would be of nothing.

        Communicates: one all-gather where optimizer state is sharded and parameters are not, else nothing.
        """
        base, self._base = self._base, None
        if self.buffer.is_sharded or self.buffer.comm.size == 1:
            return FinishedWork(self.buffer.full)
        self.buffer.assume(self.buffer.owned)
        is_exact |= not self.is_trained or (self.row.sent.is_difference and base is None)
        wires = None if is_exact else self._wires
        if wires and base is not None:
            keep_for_current_stream(base)
            wires = {axis: replace(wire, base=base) for axis, wire in wires.items()}
        return self.buffer.redistribute(Placement(), wire=wires)

    def publish(self, *, is_exact: bool = False) -> None:
        """The main parameters were set: copy them to the parameters, and bring replicas of this range up to date.

        Args:
            is_exact: as of ``update_replicas``.

        Communicates: as ``update_replicas``. Order: blocks until peers have read this rank's range.
        """
        with torch.no_grad():
            if self.is_trained and self.has_own_main:
                with self.resident(), self.buffer.storage.resident(is_overwritten=True):
                    self.buffer.shard.copy_(self.main if self.updates is None else self.updates.parameters_of(self))
            self.update_replicas(is_exact=is_exact).wait()
            self.buffer.wait_for_peers()

    def start_fetch(self, *, from_second: bool = False, used: Used | None = None) -> None:
        """Begin to read what ``gather`` with these arguments needs from a disk. Does not block the host."""
        if not self._is_read_from_second(from_second):
            self.buffer.storage.start_fetch(self.buffer.bytes_of(self.buffer.layout.ranges_of(used)))

    def fetch(self, *, from_second: bool = False, used: Used | None = None) -> None:
        """Wait until it is read. Raises: TierError: it could not be."""
        if not self._is_read_from_second(from_second):
            self.buffer.storage.fetch(self.buffer.bytes_of(self.buffer.layout.ranges_of(used)))

    def _is_read_from_second(self, from_second: bool) -> bool:
        return from_second and self.second is not None and self.second.is_kept

    def attach_views(self) -> None:
        """Make the parameters views of the whole buffer."""
        for parameter, view in zip(self.parameters, self.buffer.views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Make the parameters placeholders, until ``attach_views()``."""
        for parameter, substitute in zip(self.parameters, self.placeholders, strict=True):
            parameter.data = substitute

    @cached_property
    def placeholders(self) -> list[torch.Tensor]:
        """By parameter, what it is while it must not be read."""
        buffer = self.buffer
        return [placeholder(spec.shape, buffer.dtype, buffer.device) for spec in buffer.layout.specs]

    def detach(self) -> None:
        """Give the parameters tensors of their own and free the buffer's memory (the buffer must be full)."""
        for parameter, view in zip(self.parameters, self.buffer.views, strict=True):
            parameter.data = view.clone()
        self.buffer.drop()
        self.second = None

    # optimizer state

    def state_of(self, part: ParameterRange) -> dict[str, Any]:
        """The optimizer state of one range; empty before the first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(part.param, {})

    def stored_state(self) -> Iterator[tuple[ParameterRange, str, torch.Tensor | EncodedState]]:
        """The states of one element per element of a range, as they are stored: the range, the key and the values."""
        for part in self.ranges:
            for key, value in list(self.state_of(part).items()):
                if is_elementwise(value, part.param.numel()):
                    yield part, key, value

    def elementwise_state(self) -> Iterator[tuple[ParameterRange, str, torch.Tensor]]:
        """The same as tensors. The group is ``resident``."""
        for part, key, value in self.stored_state():
            assert isinstance(value, torch.Tensor), f"{key} of {self.label} is encoded"
            yield part, key, value

    def ranges_of(self, slot: int) -> Iterator[tuple[ParameterRange, Segment]]:
        """The ranges that hold a part of one parameter, with that part."""
        for part in self.ranges:
            for segment in part.segments:
                if segment.slot == slot:
                    yield part, segment

    # consistency

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep main parameters and optimizer state in memory, wherever and however they are stored, as tensors; changes
        are stored.
        """
        self.synchronize()
        with nullcontext() if self.disk is None else self.disk.resident(self):
            self._num_readers += 1
            if self._num_readers == 1:
                self._hold_state(is_encoded=False)
            try:
                yield
            finally:
                self._num_readers -= 1
                if not self._num_readers:
                    self._hold_state(is_encoded=True)

    def _hold_state(self, *, is_encoded: bool) -> None:
        """Hold optimizer state as it is stored, or as tensors."""
        if self.state_format is not None and self.optimizer is not None:
            for part in self.ranges:
                if state := decoded(self.state_of(part)):
                    self.optimizer.state[part.param] = self.encoded(part, state) if is_encoded else state

    def encoded(self, part: ParameterRange, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of a range as it is stored."""
        return encoded(state, self.state_format, part.segments, part.param.numel())

    def synchronize(self) -> None:
        """Wait for pending updates and readers; afterwards the state may be modified."""
        self.wait_for_readers()
        if self.updates is not None:
            self.updates.synchronize(self)

    def wait_for_readers(self) -> None:
        """Wait until an asynchronous save no longer reads main parameters, optimizer state and shard."""
        if self.before_change is not None:
            self.before_change()
            self.before_change = None

    @torch.no_grad()
    def update_main(self, start: int, stop: int, new: torch.Tensor) -> None:
        """Parameters in ``[start, stop)`` of the owned range were set to ``new``: update the main parameters.

        Where a parameter is what its main parameter rounds to, the main parameter keeps its precision.
        """
        if not self.has_own_main:
            self.synchronize()
            return
        with self.resident():
            was = self.main[start:stop].to(new.device)
            self.main[start:stop].copy_(torch.where(new != was.to(new.dtype), new.to(was.dtype), was))
