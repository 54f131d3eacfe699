"""Issues the reductions of all units in one order, the same on every rank.

    nothing is sharded     a unit is reduced when all its parameters have their gradients and its turn has come: the
    (stages 0 to 2)        order is the units' own, backwards, and from the second pass on rank 0's of the first
    parameters are         backward gathers units too, so a reduction has a fixed place among the gathers: when the
    sharded (stage 3)      backward pass enters the next unit, whichever gradients have arrived on this rank

In both cases what is left is reduced when the pass ends. Missing gradients count as zeros; one that arrives after its
unit was reduced stays in ``parameter.grad`` and joins the next reduction, at the latest at the step. So ranks whose
forward uses different parameters issue the same collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from shoal.comm.protocol import Communicator
from shoal.errors import CommError
from shoal.sharding.unit import Unit

MAX_UNDER_WAY = 2  # a rank may be this many units ahead of the slowest before it waits


class Reducer:
    """Reductions in order.

    Args:
        units: those with trained parameters.
        comm: the ranks that have these units (for the one exchange of the order).
        has_overlap: leave one reduction under way while backward goes on.
        follows_gathers: backward gathers units; see the module.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Communicator,
        *,
        has_overlap: bool,
        follows_gathers: bool,
        device: torch.device,
    ) -> None:
        self.units = list(units)
        self.is_syncing = True  # False: inside no_sync()
        self.is_held = False  # True: passes reduce nothing, a pipeline does with ``reduce_now``
        self.at_step = True  # this pass is the last one before the step, and outside of no_sync()
        self.timed: Callable[[str], AbstractContextManager[object]] = nullcontext  # around waits: "gather", "reduce"
        self._order = list(reversed(self.units))
        self._comm = comm
        self._device = device
        self._has_overlap = has_overlap
        self._follows_gathers = follows_gathers
        self._completed: list[Unit] | None = None if follows_gathers else []
        self._next = 0
        self._under_way: deque[tuple[Unit, bool]] = deque()

    def _reduces(self, unit: Unit) -> bool:
        return not self.is_held and unit.reduces(at_step=self.at_step, is_syncing=self.is_syncing)

    def complete(self, unit: Unit) -> None:
        """Every parameter of ``unit`` has its gradient of this pass."""
        if not self._reduces(unit):
            unit.accumulate()
            return
        if self._follows_gathers:
            return
        if self._completed is not None:
            self._completed.append(unit)
        while self._next < len(self._order):
            head = self._order[self._next]
            if self._reduces(head):
                if not head.is_complete:
                    break
                self._issue(head)
            self._next += 1

    def leave(self, units: Sequence[Unit]) -> None:
        """Backward has left these units and is about to gather another: reduce them, complete or not."""
        for unit in units:
            if unit.trained and not unit.is_reduced and self._reduces(unit):
                self._issue(unit)

    def _issue(self, unit: Unit) -> None:
        self.wait_reduced(MAX_UNDER_WAY - 1)
        with self.timed("reduce"):
            unit.reduce(at_step=self.at_step)
        self._under_way.append((unit, self.at_step))
        if not self._has_overlap or self._comm.size == 1:
            self.wait_reduced()

    def wait_reduced(self, num_left: int = 0) -> None:
        """Wait for the oldest reductions under way, until ``num_left`` are."""
        while len(self._under_way) > num_left:
            unit, at_step = self._under_way.popleft()  # a pass of another stage of the pipeline may have begun since
            with self.timed("reduce"):
                unit.wait_reduced(at_step=at_step)

    def finish(self, *, is_reduced: bool) -> None:
        """Backward has ended: reduce what is left, in order, and wait for all.

        Args:
            is_reduced: False: the pass gave no weight gradient, so there is nothing to reduce.
        """
        for unit in self._order if is_reduced else ():
            if not self._reduces(unit):
                if not unit.is_complete:
                    unit.accumulate()
            elif not unit.is_reduced:
                self._issue(unit)
        self.wait_reduced()
        if is_reduced and self.at_step:
            self._adopt_order()
        for unit in self.units:
            unit.start_pass()
        self._next = 0

    def reduce_now(self, units: Sequence[Unit]) -> None:
        """Between two passes, for a pipeline schedule: sum what these units have accumulated for the step, in order.

        Every rank that has them calls. ``wait_reduced`` completes it.
        """
        at_step, self.at_step = self.at_step, True
        for unit in units:
            self._issue(unit)
        self.at_step = at_step

    def reduce_unsynced(self, *, at_step: bool) -> None:
        """Between two passes: sum what passes in ``no_sync`` have accumulated, as a pass would. Every rank calls.

        Args:
            at_step: the optimizer steps next.
        """
        self.at_step = at_step
        for unit in self._order:
            if self._reduces(unit):
                self._issue(unit)
        self.wait_reduced()
        for unit in self.units:
            unit.start_pass()
            for gradient in unit.gradients:
                gradient.show()

    def complete_step(self) -> None:
        """At the step: sum what no pass has summed yet, in order."""
        for unit in self._order:
            for gradient in unit.gradients:
                gradient.complete()
                gradient.take_back()

    def reduce_late(self, has_late: Sequence[bool]) -> None:
        """Reduce once more the units (by index) in which some rank has a gradient that arrived after the reduction."""
        for unit, is_late in zip(self.units, has_late, strict=True):
            if is_late:
                unit.reduce(at_step=True)
                unit.wait_reduced(at_step=True)

    def _adopt_order(self) -> None:
        if self._completed is None or not self.units:
            return
        completed, self._completed = self._completed, None
        index_of = {unit.name: index for index, unit in enumerate(self.units)}
        order = list(dict.fromkeys(index_of[unit.name] for unit in (*completed, *self._order)))
        if self._comm.size == 1:
            return
        sent = torch.tensor(order, dtype=torch.float32, device=self._device)
        mine = self._comm.exchange(sent, label="order of reductions").wait()
        first = self._comm.read(mine[0], when_fake=-1.0)
        if first[0] >= 0:
            self._order = [self.units[int(index)] for index in first]

    def reset(self) -> None:
        """After an error: drop what is under way, and the gradients of this pass."""
        with suppress(CommError):  # a peer is gone; the error that came first counts
            self.wait_reduced()  # what still writes into a sum must not do so in a later step
        self._under_way.clear()
        self._next = 0
        for unit in self.units:
            unit.start_pass()
            for gradient in unit.gradients:
                gradient.reset()
            for parameter in unit.trained_parameters:
                parameter.grad = None
