"""Orders without memory: permutations, uniform, and the same bits everywhere."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import shoal.data.order
from shoal.data import shuffled


@pytest.mark.parametrize("num", [*range(1, 40), 63, 64, 65, 255, 257, 1000, 65_536, 99_991])
def test_an_order_has_each_index_once_and_another_in_each_epoch_and_with_each_seed(num: int) -> None:
    orders = [shuffled(np.arange(num), num, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(num))
    if num > 8:
        assert len({order.tobytes() for order in orders}) == 3


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(shoal.data.order).failed == 0


def test_a_place_needs_no_other_place() -> None:
    whole = shuffled(np.arange(1000), 1000, 5, 2)
    assert [int(shuffled(place, 1000, 5, 2)) for place in (0, 17, 999)] == whole[[0, 17, 999]].tolist()
    assert shuffled([[3], [4]], 1000, 5, 2).tolist() == whole[[[3], [4]]].tolist()
    assert shuffled([], 0, 0, 0).tolist() == []
    huge = 10**15
    assert 0 <= int(shuffled(huge - 1, huge, 0, 0)) < huge
    with pytest.raises(IndexError, match="1000 of an order of 1000"):
        shuffled([0, 1000], 1000, 0, 0)


def test_the_bits_of_an_order_are_these() -> None:
    assert shuffled(range(10), 10, seed=7, epoch=3).tolist() == [5, 2, 1, 4, 7, 3, 9, 0, 8, 6]
    assert shuffled([0, 1, 10**9], 3 * 10**9, seed=-1, epoch=0).tolist() == [2424064365, 909449626, 488772700]


@pytest.mark.parametrize("num", [2, 3, 5, 7, 12])
def test_pairs_of_neighbours_are_equally_frequent_over_seeds(num: int) -> None:
    """Chi-square of the ordered pairs that the first two and the last two places have."""
    trials = 6000
    pairs = num * (num - 1)
    for places in ([0, 1], [num - 2, num - 1]):
        counts = np.zeros((num, num))
        for seed in range(trials):
            first, second = shuffled(places, num, seed, epoch=seed % 3)
            counts[first, second] += 1
        expected = trials / pairs
        seen = counts[~np.eye(num, dtype=bool)]
        chi_square = float(((seen - expected) ** 2 / expected).sum())
        assert chi_square < pairs - 1 + 5 * (2 * (pairs - 1)) ** 0.5  # five standard deviations above the mean


def test_the_distance_of_neighbours_in_a_large_order_is_as_of_random_pairs() -> None:
    num, bins = 100_003, 20
    order = shuffled(np.arange(num), num, 0, 0)
    counts, *_ = np.histogram2d(order[:-1], order[1:], bins=bins, range=[[0, num], [0, num]])
    expected = (num - 1) / bins**2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins**2 - 1)) < 5 * (2 * bins**2) ** 0.5
    assert abs(int((order[:100] < num // 2).sum()) - 50) < 25
