"""Issues the reductions of all units in one order, the same on every rank, each right after its predecessors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from shoal.comm.protocol import Communicator
from shoal.device import read_vector
from shoal.errors import CommError
from shoal.memory.placement import Kind
from shoal.zero.gradient import BucketGradient
from shoal.zero.unit import Unit

MAX_UNDER_WAY = 2  # a rank may be this many units ahead of the slowest before it waits


class UnitGradient:
    """The gradients of one unit: which parameters have theirs in this backward pass."""

    def __init__(self, unit: Unit, gradients: Sequence[BucketGradient]) -> None:
        self.unit = unit
        self.gradients = list(gradients)
        self.num_parameters = sum(len(gradient.parameters) for gradient in self.gradients)
        self.seen = bytearray(self.num_parameters)
        self.left = self.num_parameters
        self.is_issued = False

    @property
    def is_complete(self) -> bool:
        return self.left == 0

    def mark(self, index: int) -> bool:
        """Parameter ``index`` has its gradient. Returns: was it the last one that was missing?"""
        if self.seen[index]:
            return False
        self.seen[index] = 1
        self.left -= 1
        return self.left == 0

    def start_pass(self) -> None:
        self.seen = bytearray(self.num_parameters)
        self.left = self.num_parameters
        self.is_issued = False


class Reducer:
    """Reductions in order.

    The first order is the units' own, backwards; after the first reduced pass rank 0's order of completion takes its
    place on every rank.

    Args:
        comm: all ranks that train together (for the one exchange of the order).
        has_overlap: leave one reduction under way while backward goes on.
    """

    def __init__(
        self, entries: Sequence[UnitGradient], comm: Communicator, *, has_overlap: bool, device: torch.device
    ) -> None:
        self.entries = list(entries)
        self.is_syncing = True  # False: inside no_sync()
        self.at_step = True  # this pass is the last one before the step
        self.on_reduced: Callable[[UnitGradient], None] | None = None  # a unit was reduced
        self._order = list(reversed(self.entries))
        self._comm = comm
        self._device = device
        self._has_overlap = has_overlap
        self._completed: list[UnitGradient] | None = []
        self._next = 0
        self._under_way: deque[UnitGradient] = deque()

    def _is_reduced_now(self, entry: UnitGradient) -> bool:
        """Partial accumulators wait for the last micro-batch; sharded ones are reduced each time."""
        return self.is_syncing and (self.at_step or entry.unit.row.gradient_between.inner is Kind.SHARD)

    def complete(self, entry: UnitGradient) -> None:
        """Every parameter of ``entry`` has its gradient."""
        if self._completed is not None:
            self._completed.append(entry)
        if not self._is_reduced_now(entry):
            self._keep(entry)
            return
        while self._next < len(self._order):
            head = self._order[self._next]
            if not head.is_complete and self._is_reduced_now(head):
                break
            if self._is_reduced_now(head):
                self._issue(head)
            self._next += 1

    def _keep(self, entry: UnitGradient) -> None:
        """Keep what this pass gave until a later one, or the step, reduces it."""
        for gradient in entry.gradients:
            if entry.unit.row.gradient_between.inner is Kind.SHARD:
                gradient.hold()
            else:
                gradient.accumulate()

    def _issue(self, entry: UnitGradient) -> None:
        self._settle(MAX_UNDER_WAY - 1)
        for gradient in entry.gradients:
            gradient.start_reduce(at_step=self.at_step)
        entry.is_issued = True
        self._under_way.append(entry)
        if not self._has_overlap:
            self._settle()

    def _settle(self, num_left: int = 0) -> None:
        """Wait for the oldest reductions under way, until ``num_left`` are."""
        while len(self._under_way) > num_left:
            entry = self._under_way.popleft()
            for gradient in entry.gradients:
                gradient.settle(at_step=self.at_step)
            if self.on_reduced is not None:
                self.on_reduced(entry)

    def finish(self) -> None:
        """Backward has ended: reduce what is still open, in order, and wait for all."""
        for entry in self._order[self._next :]:
            if self._is_reduced_now(entry):
                if not entry.is_issued:
                    self._issue(entry)
            elif not entry.is_complete:
                self._keep(entry)
        self._settle()
        if self.is_syncing and self.at_step:
            self._adopt_order()
        for entry in self.entries:
            entry.start_pass()
        self._next = 0

    def reduce_late(self, has_late: Sequence[bool]) -> None:
        """Reduce once more the units (by index of ``entries``) in which some rank has a gradient that came after its
        unit was reduced.
        """
        for entry, is_late in zip(self.entries, has_late, strict=True):
            if is_late:
                for gradient in entry.gradients:
                    gradient.start_reduce(at_step=True)
                    gradient.settle(at_step=True)

    def _adopt_order(self) -> None:
        if self._completed is None:
            return
        completed, self._completed = self._completed, None
        if self._comm.size == 1 or not self.entries:  # a frozen model has no reductions to put in order
            return
        index_of = {id(entry): index for index, entry in enumerate(self.entries)}
        order = [index_of[id(entry)] for entry in dict.fromkeys(completed)]
        order += [index_of[id(entry)] for entry in self._order if index_of[id(entry)] not in set(order)]
        sent = torch.tensor(order, dtype=torch.float32, device=self._device)
        mine = self._comm.exchange(sent, label="order of reductions").wait()
        first = read_vector(mine[0], when_fake=-1.0)
        if first[0] >= 0:
            self._order = [self.entries[int(index)] for index in first]

    def reset(self) -> None:
        """Drop what is under way, after an error. The gradients that this backward pass left are dropped too."""
        with suppress(CommError):  # a peer is gone; the error that came first counts
            self._settle()  # what still writes into an accumulator must not do so in a later step
        self._under_way.clear()
        self._next = 0
        for entry in self.entries:
            entry.start_pass()
            for gradient in entry.gradients:
                gradient.reset()
                for parameter in gradient.parameters:
                    parameter.grad = None
