"""The order in which units are used: recorded in one pass, followed in the next to gather ahead.

When a pass departs from the recorded order it goes on without prefetch, the departure is counted and the order is
recorded anew: nothing is wrong, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from shoal.sharding.unit import LiveNumel, Unit


def kind_of_pass() -> str:
    """Passes of one kind use the units in one order."""
    return "training" if torch.is_grad_enabled() else "evaluation"


class UnitOrder:
    """One recorded order per kind of pass (training, evaluation).

    Args:
        live: elements that are gathered now.
        prefetch_numel: at the use of a unit, gather ahead at most this many elements, or one unit; 0: nothing. Uses
            gather ahead until ``max_live_numel``: where gathers are as long as computation, that saves up to 9 %.
        max_live_numel: keep gathered, and gather more than one unit ahead, only while fewer elements than this are
            gathered; the next unit is gathered ahead if it has no more itself.
        max_reuse_numel: keep a unit gathered if at most this many elements are gathered before its next use.
    """

    def __init__(self, live: LiveNumel, *, prefetch_numel: int, max_live_numel: int, max_reuse_numel: int) -> None:
        self.live = live
        self._max_reuse_numel = max_reuse_numel
        self._prefetch_numel = prefetch_numel
        self.max_live_numel = max_live_numel
        self._recorded: dict[str, list[tuple[Unit, bool]]] = {}  # True if it was in backward
        self._visited: list[tuple[Unit, bool]] = []
        self._key = ""
        self._is_following = False

    def start(self) -> None:
        """A pass begins."""
        self.end()
        key = self._key = kind_of_pass()
        self._visited = []
        self._is_following = key in self._recorded

    def end(self) -> None:
        """The pass is over: keep its order, unless it followed the recorded one."""
        if self._visited and not (self._is_following and len(self._visited) <= len(self._recorded[self._key])):
            self._recorded[self._key] = self._visited
        self._visited = []

    @property
    def is_known(self) -> bool:
        """True if any pass has been recorded, or is being recorded."""
        return bool(self._recorded or self._visited)

    def forget(self) -> None:
        """Begin anew: the next pass gathers nothing ahead, and is recorded."""
        self._recorded.clear()
        self._visited = []
        self._is_following = False

    def visit(self, unit: Unit, *, in_backward: bool) -> None:
        """A unit is about to be used."""
        position = len(self._visited)
        self._visited.append((unit, in_backward))
        if self._is_following:
            order = self._recorded[self._key]
            if position >= len(order) or order[position][0] is not unit:
                self._is_following = False

    def ahead(self, is_expected: Callable[[Unit, bool], bool]) -> list[Unit]:
        """Units to gather now, because they come next: one of at most ``max_live_numel``, others within both limits.

        Of the units that are gathered if they are used the next one, whatever the limits: ranks that gather others of
        them must choose the same of the rest.

        Forward gathers nothing for backward: the units that it used last, and backward needs first, are still to be
        released. A unit whose update on the host is pending, and those after it, wait for ``after_update``.
        """
        if not self._is_following or not self._prefetch_numel:
            return []
        chosen: list[Unit] = []
        numel = 0
        is_next = True  # the unit that comes next does not count with the one that runs
        has_used = False  # True if one is chosen that is gathered if it is used
        for unit, in_backward in self._recorded[self._key][len(self._visited) :]:
            if in_backward != self._visited[-1][1]:
                break
            if unit.if_used is not None:
                if not has_used and is_expected(unit, in_backward):
                    has_used = True
                    if unit.is_released and not unit.has_pending_update:
                        chosen.append(unit)
                continue
            if unit.has_pending_update and unit.is_released:
                break
            live = 0 if is_next else self.live.numel + numel
            is_next = False
            if live + unit.numel > self.max_live_numel or (numel and numel + unit.numel > self._prefetch_numel):
                break
            if unit.is_released and unit not in chosen:
                chosen.append(unit)
                numel += unit.numel
        return chosen

    def after_update(self) -> Unit | None:
        """The next unit, if its update on the host is pending: gathered when this unit's forward has been queued.

        Gathering waits for the update and so blocks the host; before this unit's forward, that would idle the device.
        """
        later = next((unit for unit, _ in self.upcoming() if unit.is_released and unit.if_used is None), None)
        if later is None or not self._prefetch_numel or later.numel > self.max_live_numel:
            return None
        return later if later.has_pending_update else None

    def upcoming(self) -> Iterator[tuple[Unit, bool]]:
        """The units that come next and whether in backward, up to the pass's end: to be read from a disk ahead."""
        if self._is_following:
            yield from self._recorded[self._key][len(self._visited) :]

    def is_worth_keeping(self, unit: Unit, running: Collection[Unit]) -> bool:
        """True if ``unit`` is to stay gathered after its forward. The arguments are as ``reuse_distance``'s."""
        distance = self.reuse_distance(unit, running)
        return distance is not None and distance <= self._max_reuse_numel and self.live.numel <= self.max_live_numel

    def reuse_distance(self, unit: Unit, running: Collection[Unit] = ()) -> int | None:
        """Elements gathered for other units before ``unit`` is used again; None: it is not, or it is unknown.

        Args:
            running: units whose forward runs ``unit``. They are gathered, so a use of theirs gathers nothing.

        It is 0 for the last unit of forward and those that run it: backward begins with them. The same on every rank,
        since it is counted in units used, which every rank uses in the same order.
        """
        if not self._is_following:
            return None
        numel = 0
        for later, _ in self._recorded[self._key][len(self._visited) :]:
            if later is unit:
                return numel
            numel += 0 if later in running else later.numel
        return None
