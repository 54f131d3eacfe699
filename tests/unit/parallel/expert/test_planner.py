"""Which experts change ranks by measured load: a pure function."""

from __future__ import annotations

import random

import pytest

from shoal.parallel.expert.rebalance import ExpertsByRank, most_loaded, num_moved, plan_copies, plan_placement


def neighbours(num_experts: int, size: int) -> ExpertsByRank:
    each = num_experts // size
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(size))


def longest_first(loads: list[float], size: int) -> float:
    """The most loaded rank over the mean when each expert, the most loaded first, goes to the least loaded rank."""
    totals, free = [0.0] * size, [len(loads) // size] * size
    for load in sorted(loads, reverse=True):
        rank = min((rank for rank in range(size) if free[rank]), key=totals.__getitem__)
        totals[rank], free[rank] = totals[rank] + load, free[rank] - 1
    return max(totals) * size / sum(totals)


def test_two_hot_experts_of_one_rank_are_divided_by_one_exchange() -> None:
    before = neighbours(8, 2)
    after = plan_placement([9, 9, 1, 1, 1, 1, 1, 1], before)
    assert after == ((4, 1, 2, 3), (0, 5, 6, 7))
    assert most_loaded([9, 9, 1, 1, 1, 1, 1, 1], after) == 1.0


@pytest.mark.parametrize("loads", [[1.0] * 8, [0.0] * 8, [8.0] + [0.0] * 7])
def test_nothing_moves_where_no_exchange_helps(loads: list[float]) -> None:
    assert plan_placement(loads, neighbours(8, 4)) == neighbours(8, 4)


def test_nothing_moves_within_the_tolerance() -> None:
    loads = [10.0, 10.3, 10.0, 10.0]
    assert plan_placement(loads, neighbours(4, 2)) == neighbours(4, 2)
    assert plan_placement([10.0, 11.0, 10.0, 10.5, 10.0, 10.0], neighbours(6, 3), tolerance=0.1) == neighbours(6, 3)


def test_the_present_placement_is_where_the_planner_begins() -> None:
    before = ((4, 1, 2, 3), (0, 5, 6, 7))
    assert plan_placement([9, 9, 1, 1, 1, 1, 1, 1], before) == before


@pytest.mark.parametrize(("num_experts", "size"), [(8, 1), (8, 2), (8, 4), (64, 8), (128, 64), (256, 32)])
def test_every_expert_keeps_its_place_and_no_rank_gets_worse(num_experts: int, size: int) -> None:
    generator = random.Random(num_experts + size)
    for _ in range(10):
        loads = [generator.expovariate(1) for _ in range(num_experts)]
        before = neighbours(num_experts, size)
        after = plan_placement(loads, before, tolerance=0)
        for place in range(num_experts // size):
            assert {own[place] for own in after} == {own[place] for own in before}
        assert most_loaded(loads, after) <= most_loaded(loads, before)


@pytest.mark.parametrize(("num_experts", "size"), [(64, 8), (256, 32), (128, 64)])
def test_the_balance_is_that_of_the_longest_first_and_fewer_experts_move(num_experts: int, size: int) -> None:
    generator = random.Random(7)
    ours, best, share = 0.0, 0.0, 0.0
    for _ in range(10):
        loads = [generator.expovariate(1) for _ in range(num_experts)]
        after = plan_placement(loads, neighbours(num_experts, size), tolerance=0)
        ours += most_loaded(loads, after) / 10
        best += longest_first(loads, size) / 10
        share += num_moved(neighbours(num_experts, size), after) / num_experts / 10
    assert ours <= 1.02 * best
    assert share < 0.4


def test_experts_are_copied_only_where_no_exchange_balances_the_ranks() -> None:
    before = neighbours(8, 4)
    assert plan_copies([9, 9, 1, 1, 1, 1, 1, 1], neighbours(8, 2), 4) == ((), ((4, 1, 2, 3), (0, 5, 6, 7)))
    assert plan_copies([40, 1, 1, 1, 1, 1, 1, 1], before, 4) == ((0,), before)
    assert plan_copies([40, 30, 1, 1, 1, 1, 1, 1], before, 1)[0] == (0,)
    assert plan_copies([40, 30, 1, 1, 1, 1, 1, 1], before, 0)[0] == ()
    assert plan_copies([0.0] * 8, before, 4) == ((), before)
