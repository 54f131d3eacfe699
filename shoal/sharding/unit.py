"""A unit: parameters that are needed together, its three verbs, and the small state machine of its memory.

| state     | memory held                                   | for a shard on a disk                 |
| --------- | --------------------------------------------- | ------------------------------------- |
| ON_DISK   |                                               | nothing                               |
| FETCHING  |                                               | a buffer on the host, not filled yet  |
| SHARDED   | the shard, on its tier                        | that buffer, filled                   |
| GATHERING | the shard and the full buffer, not filled yet | the full buffer, not filled yet       |
| FULL      | the shard and the full buffer                 | the full buffer                       |

A unit whose parameters are stored as Replicate is always FULL; with ``overlap_param_gather`` it is GATHERING from the
step until its next use. ``gather``, ``release`` and ``reduce`` may be called by
a hook, by a pipeline schedule or by the user (``GatheredParameters``): pins are counted, and while one is left a unit
stays gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from operator import or_
from typing import Protocol

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.comm.side_stream import CopyDone
from shoal.errors import PlacementError
from shoal.sharding.gradient import Gradient
from shoal.sharding.layout import Used
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier


class UnitState(Enum):
    ON_DISK = "ON_DISK"
    FETCHING = "FETCHING"
    SHARDED = "SHARDED"
    GATHERING = "GATHERING"
    FULL = "FULL"

    __hash__ = object.__hash__  # in C: states are looked up in each move


_MOVES: dict[UnitState, frozenset[UnitState]] = {
    UnitState.ON_DISK: frozenset({UnitState.FETCHING}),
    UnitState.FETCHING: frozenset({UnitState.SHARDED}),
    UnitState.SHARDED: frozenset({UnitState.GATHERING, UnitState.ON_DISK}),
    UnitState.GATHERING: frozenset({UnitState.FULL}),
    UnitState.FULL: frozenset({UnitState.SHARDED, UnitState.GATHERING}),
}


class IfUsed(Protocol):
    """Parameters of a module that are gathered if the forward that runs uses them."""

    @property
    def module(self) -> str:
        """The name of the module whose forward needs them."""
        ...

    def start(self, comm: Communicator) -> None:
        """The ranks along ``comm`` gather them together from now on."""
        ...

    def used(self) -> Used | None:
        """The blocks of them that the forward which runs uses. None: it is not known."""
        ...

    def stop(self) -> None:
        """They are never released from now on."""
        ...


class LiveNumel:
    """Elements of sharded units that are gathered now, the same on every rank: without those gathered if used."""

    def __init__(self) -> None:
        self.numel = 0


class Unit:
    """Parameter groups that are gathered, released and reduced together.

    Args:
        if_used: of a unit that is gathered if it is used. All ranks that gather it agree on the blocks that are used;
            other ranks may gather others. Its module runs in any case, on placeholders if it uses none: without rows it
            reads no value.
        live: counts the unit's elements while it is gathered.
    """

    def __init__(
        self,
        name: str,
        index: int,
        groups: Sequence[ParameterGroup],
        *,
        if_used: IfUsed | None = None,
        live: LiveNumel | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.groups = list(groups)
        self.trained = [group for group in self.groups if group.is_trained]
        self.sharded = [group for group in self.groups if group.buffer.is_sharded]
        self.is_sharded = bool(self.sharded)
        self.is_on_disk = any(group.buffer.storage.tier is Tier.DISK for group in self.groups)
        self.second_shards = [group.second for group in self.groups if group.second is not None]
        self.numel = sum(group.buffer.layout.numel for group in self.groups)
        self.if_used = if_used
        self._gathered: Used | None = None  # the blocks of the present, or last, gather; None: all
        self._live = live if live is not None and self.is_sharded and if_used is None else LiveNumel()
        self._live.numel += self.numel
        self.state = UnitState.FULL
        self.pin_count = 0  # callers other than the hooks that need it full
        self.shared: list[Unit] = []  # other units whose parameters this unit's forward reads
        self._works: list[Work | CopyDone] = []
        self._gathering: list[ParameterGroup] = []
        self._updated_late: list[ParameterGroup] = []  # of these, what is gathered after an update on the host
        self._has_grad = bytearray(len(self.trained_parameters))  # in this backward pass
        self.is_reduced = False  # in this backward pass
        # A step has started an update on the host since the last gather. The same on every rank: no thread is asked.
        self.has_pending_update = False

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value})"

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters, in the order of the buffers."""
        return (parameter for group in self.groups for parameter in group.parameters)

    @property
    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that have gradients, in the order of ``mark_grad``'s index."""
        return [parameter for group in self.trained for parameter in group.parameters]

    @property
    def gradients(self) -> Iterator[Gradient]:
        return (group.gradient for group in self.trained)

    def used(self) -> Used | None:
        """The blocks that the forward which runs uses; None: all, or it is not known."""
        return None if self.if_used is None else self.if_used.used()

    def share(self, read: Unit) -> None:
        """From now on the forward of this unit gathers ``read``, whose parameters it reads, too."""
        if read is not self and read not in self.shared and read.is_sharded:
            self.shared.append(read)

    def _move(self, to: UnitState) -> None:
        if to not in _MOVES[self.state]:
            raise PlacementError(
                f"unit {self.name!r} cannot go from {self.state.value} to {to.value}.",
                do=f"from {self.state.value} the moves are: {', '.join(sorted(s.value for s in _MOVES[self.state]))}.",
                code="unit-move",
            )
        was_released = self.is_released
        self.state = to
        if self.is_released != was_released:
            self._live.numel += self.numel if was_released else -self.numel

    # gather and release

    @property
    def is_released(self) -> bool:
        """True if it is neither gathered nor being gathered."""
        return self.state in (UnitState.SHARDED, UnitState.ON_DISK, UnitState.FETCHING)

    def holds(self, used: Used | None) -> bool:
        """True if these blocks are gathered, or being gathered."""
        return not self.is_released and _union(self._gathered, used) == self._gathered

    def start_fetch(self, *, from_second: bool = False, used: Used | None = None) -> None:
        """Begin to read the shard from its disk. Nothing where it is stored elsewhere. Does not block the host.

        Args:
            used: the blocks that are read; None: all.
        """
        if self.state is not UnitState.ON_DISK:
            return
        self._move(UnitState.FETCHING)
        for group in self.groups:
            group.start_fetch(from_second=from_second, used=used)

    def can_fetch_ahead(self) -> bool:
        """True if there is room to read the shard ahead of its use."""
        return all(group.buffer.storage.can_fetch_ahead() for group in self.groups)

    def start_gather(self, *, from_second: bool = False, used: Used | None = None, is_exact: bool = False) -> None:
        """Begin to gather. Nothing when it is gathered or on the way.

        Args:
            used: the blocks that are gathered; None: all.
            is_exact: values are sent as they are stored, whatever format the row has.

        Raises: TierError: the shard could not be read from its disk.
        Communicates: per sharded group, and per group that a step has left to this, one all-gather, (N - 1) / N of the
            buffer received per rank.
        Order: waits for an update of the unit on the host; blocks the host until a shard on a disk has been read.
        """
        if self._updated_late:
            self.finish_updates()
            self._works += [group.update_replicas() for group in self._updated_late]
            self._updated_late = []
        if not self.is_released:
            return
        self.finish_updates()
        if self.state is not UnitState.SHARDED:
            self.start_fetch(from_second=from_second, used=used)
            for group in self.groups:
                group.fetch(from_second=from_second, used=used)
            self._move(UnitState.SHARDED)
        self._move(UnitState.GATHERING)
        self._gathered = used
        self._gathering = self.sharded
        self._works = [group.gather(from_second=from_second, used=used, is_exact=is_exact) for group in self.sharded]

    def wait_also(self, done: CopyDone) -> None:
        """``gather()`` waits for ``done``, too, on the device."""
        self._works.insert(0, done)

    def finish_updates(self) -> None:
        """Wait for updates of the groups on the host; work queued on the device afterwards sees their parameters."""
        self.has_pending_update = False
        for group in self.trained:
            if group.updates is not None:
                group.updates.finish(group)

    def defer_gather(
        self, gathers: Sequence[tuple[ParameterGroup, Work]], updated_late: Sequence[ParameterGroup] = ()
    ) -> None:
        """After the step: parameters that are stored whole are being gathered. Until ``gather()`` they read as NaN.

        Args:
            updated_late: groups whose update on the host is under way: ``start_gather()`` gathers them.
        """
        self._move(UnitState.GATHERING)
        self._works = [work for _, work in gathers]
        self._updated_late = list(updated_late)
        self._gathering = [*(group for group, _ in gathers), *updated_late]
        for group in self._gathering:
            group.hide()

    def gather(self, *, from_second: bool = False, used: Used | None = None, is_exact: bool = False) -> None:
        """Make the parameters whole and usable; or some blocks of them, in addition to those that are gathered.

        Args:
            used: the blocks; None: all.
            is_exact: as ``start_gather`` takes it.
        """
        if not self.is_released and not self.holds(used):
            self._complete()
            self._release()
            used = _union(self._gathered, used)
        if self.state is UnitState.FULL:
            return
        self.start_gather(from_second=from_second, used=used, is_exact=is_exact)
        self._complete()

    def _complete(self) -> None:
        """Wait for the gather under way."""
        if self.state is UnitState.FULL:
            return
        for work in self._works:
            work.wait()
        self._works = []
        for group in self._gathering:
            group.attach_views()
        self._gathering = []
        self._move(UnitState.FULL)

    def release(self, *, keep_user_views: bool = False) -> None:
        """Free the full buffers, unless the unit is pinned. Communicates nothing.

        Args:
            keep_user_views: keep the storage alive for views that the user holds.
        """
        if not self.is_sharded or self.pin_count or self.is_released:
            return
        self._complete()
        self._release(keep_user_views=keep_user_views)

    def _release(self, *, keep_user_views: bool = False) -> None:
        for group in self.sharded:
            group.release(keep_user_views=keep_user_views)
        self._move(UnitState.SHARDED)
        if self.is_on_disk:
            self._move(UnitState.ON_DISK)

    # reduce

    def mark_grad(self, index: int) -> bool:
        """Parameter ``index`` has its gradient of this pass. Returns: True if it was the last one that was missing."""
        if self._has_grad[index]:
            return False
        self._has_grad[index] = 1
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if every trained parameter has its gradient of this pass."""
        return 0 not in self._has_grad

    def start_pass(self) -> None:
        """A backward pass has ended, or begins: no gradient of it has arrived."""
        self._has_grad = bytearray(len(self._has_grad))
        self.is_reduced = False

    def reduces(self, *, at_step: bool, is_syncing: bool) -> bool:
        """True if a pass reduces the unit. A sum of the whole buffer waits for the last micro-batch before the step.
        A pass that is not ``is_syncing`` may not communicate, so it reduces what one rank has."""
        return at_step or any(not one.is_whole and (is_syncing or one.is_alone) for one in self.gradients)

    def accumulate(self) -> None:
        """Keep the gradients of this pass until a later pass, or the step, reduces them. Communicates nothing."""
        for gradient in self.gradients:
            gradient.accumulate()

    def reduce(self, *, at_step: bool) -> None:
        """Start to sum the gradients in ``parameter.grad`` over the ranks; what is missing counts as zeros.

        Called by the backward hooks, by a pipeline schedule or by the user, by every rank in the same order.
        ``wait_reduced`` completes it.

        Args:
            at_step: this is the last reduction before the optimizer's step.

        Communicates: per trained group what its row says.
        """
        for gradient in self.gradients:
            if at_step or not gradient.is_alone or gradient.has_unreduced():  # else, on one rank, there is none
                gradient.reduce(at_step=at_step)
        self.is_reduced = True

    def wait_reduced(self, *, at_step: bool) -> None:
        """Wait for ``reduce``. Gradients that the CPU optimizer needs start to move to the host."""
        for group in self.trained:
            if group.gradient.wait(at_step=at_step) and group.updates is not None:
                group.updates.send_gradient(group, at_step=at_step)


def _union(first: Used | None, second: Used | None) -> Used | None:
    """The blocks of both; None: all."""
    return None if first is None or second is None else tuple(map(or_, first, second))
