"""Which units are gathered ahead, by what is gathered already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.running.order import UnitOrder


def unit(numel: int, *, is_gathered: bool = False) -> Any:
    return SimpleNamespace(numel=numel, is_released=not is_gathered, if_used=None, has_pending_update=False)


@pytest.mark.parametrize(
    ("max_live", "expected"),
    [
        (4, []),  # the next unit is over the limit
        (5, [1]),  # it is not, though with the one that runs it is
        (10, [1]),
        (11, [1, 2]),
        (17, [1, 2, 3]),
    ],
)
def test_one_unit_may_be_gathered_in_addition_to_the_one_that_runs(max_live: int, expected: list[int]) -> None:
    units = [unit(5, is_gathered=True), unit(5), unit(1), unit(6)]
    assert numbers_ahead(units, max_live) == expected


def test_a_next_unit_that_is_gathered_leaves_the_limit_for_the_others() -> None:
    """Elements 1 and 1 are gathered; 5 more are over 6."""
    units = [unit(1, is_gathered=True), unit(1, is_gathered=True), unit(5)]
    assert numbers_ahead(units, 6) == []
    assert numbers_ahead(units, 7) == [2]


def numbers_ahead(units: list[Any], max_live: int) -> list[int]:
    """The places of the units that are gathered when the first one begins, in a pass that follows a recorded one."""
    live: Any = SimpleNamespace(numel=sum(each.numel for each in units if not each.is_released))
    order = UnitOrder(live, prefetch_numel=100, max_live_numel=max_live, max_reuse_numel=0)
    order.start()
    for each in units:
        order.visit(each, in_backward=False)
    order.start()
    order.visit(units[0], in_backward=False)
    return [units.index(each) for each in order.ahead(lambda _unit, _in_backward: True)]
