"""Blends: exact shares, no history, changes of weights, and what cannot be met."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.data.blend
from shoal.data.blend import Blend
from shoal.errors import UsageError


def blend(sizes: list[int], weights: list[float] | None = None, **options: object) -> Blend:
    return Blend([f"s{number}" for number in range(len(sizes))], sizes, weights, **options)  # type: ignore[arg-type]


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(shoal.data.blend).failed == 0


@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(0, 50) | st.floats(0.01, 10), min_size=1, max_size=7).filter(
        lambda each: sum(each) > 0
    ),
    num=st.integers(1, 400),
)
def test_every_prefix_has_its_shares_and_a_sources_samples_come_in_order(weights: list[float], num: int) -> None:
    sizes = [10_000] * len(weights)
    mixed = blend(sizes, weights, epochs=[None] * len(sizes))
    located = mixed.locate(np.arange(num))
    for source, weight in enumerate(weights):
        indices = located.rank[located.source == source]
        assert indices.tolist() == list(range(len(indices)))
        assert mixed.counts(num)[source] == len(indices)
        assert abs(len(indices) - num * weight / sum(weights)) <= math.log2(len(weights)) + 1
    one_by_one = [tuple(int(part[0]) for part in mixed.locate(place)) for place in range(num)]
    assert one_by_one == list(zip(*(part.tolist() for part in located), strict=True))


def test_without_weights_all_sources_end_together_each_as_often_as_asked() -> None:
    mixed = blend([7, 100, 13], epochs=[1, 2, 0.5])
    assert mixed.num_samples == 7 + 200 + 6
    located = mixed.locate(np.arange(mixed.num_samples))
    seen = sorted(zip(*(part.tolist() for part in located), strict=True))
    assert seen == [(0, 0, i) for i in range(7)] + [(1, e, i) for e in (0, 1) for i in range(100)] + [
        (2, 0, i) for i in range(6)
    ]
    assert mixed.counts(2 * mixed.num_samples) == [14, 400, 12]  # a second pass goes on


def test_sums_of_billions_of_samples_are_exact() -> None:
    mixed = blend([3_000_000_000, 1_500_000_000])
    assert mixed.counts(mixed.num_samples) == [3_000_000_000, 1_500_000_000]
    assert mixed.locate(mixed.num_samples - 1).rank[0] >= 1_499_999_999


@settings(max_examples=40)
@given(
    legs=st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)), max_size=4
    )
)
def test_a_change_of_weights_repeats_and_skips_no_sample(legs: list[tuple[int, list[int]]]) -> None:
    mixed = blend([1000] * 3, [1, 1, 1], epochs=[None] * 3)
    position = 0
    for length, weights in legs:
        position += length
        mixed.change(position, weights)
    located = mixed.locate(np.arange(position + 50))
    for source in range(3):
        indices = located.rank[located.source == source].tolist()
        assert indices == list(range(len(indices)))


def test_a_blend_that_cannot_be_met_is_an_error_with_figures() -> None:
    with pytest.raises(
        UsageError, match=r"s1: 50 of 20 samples \(2\.50 epochs\), at most 20\.\n[^$]*at most 41 samples"
    ) as raised:
        blend([500, 20], [1, 1], num_samples=100)
    assert "s0" not in str(raised.value)
    assert blend([500, 20], [1, 1], epochs=[1, None], num_samples=100).counts(100) == [50, 50]
    assert blend([500, 20], [1, 1]).num_samples in (40, 41)
    mixed = blend([500, 20], [24, 1], num_samples=500)
    with pytest.raises(UsageError, match="s1"):
        mixed.change(100, [1, 1])
    assert mixed.counts(500) == [480, 20]  # nothing has changed
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]):
        with pytest.raises(UsageError, match="weights"):
            blend([5, 5], weights)
