"""Flat ranges as rectangles, against numpy's own slicing."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.checkpoint import rectangles as module
from shoal.checkpoint.rectangles import Rectangle, cover_problem, rectangles, whole

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def slices(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(rectangle.start, rectangle.shape, strict=True))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    numel = math.prod(shape)
    begin = draw(st.integers(0, numel))
    return shape, begin, draw(st.integers(begin, numel))


@st.composite
def nested(draw: st.DrawFn) -> tuple[tuple[int, ...], Rectangle, Rectangle]:
    """A shape and two rectangles inside it."""
    shape = draw(SHAPES)

    def inside() -> Rectangle:
        start = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Rectangle(start, tuple(draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True)))

    return shape, inside(), inside()


def test_the_picture_is_true() -> None:
    results = doctest.testmod(module)
    assert results.attempted >= 1 and results.failed == 0


@pytest.mark.parametrize(
    ("shape", "begin", "end", "expected"),
    [
        ((4, 5), 3, 17, [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]),
        ((4, 5), 0, 20, [((0, 0), (4, 5))]),
        ((4, 5), 6, 9, [((1, 1), (1, 3))]),
        ((4, 5), 5, 10, [((1, 0), (1, 5))]),
        ((4, 5), 4, 6, [((0, 4), (1, 1)), ((1, 0), (1, 1))]),
        ((7,), 2, 5, [((2,), (3,))]),
        ((), 0, 1, [((), ())]),
        ((), 0, 0, []),
        ((0, 4), 0, 0, []),
        ((3, 0), 0, 0, []),
        (
            (2, 3, 4),
            5,
            22,
            [((0, 1, 1), (1, 1, 3)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 2, 4)), ((1, 2, 0), (1, 1, 2))],
        ),
    ],
)
def test_a_range_is_these_rectangles(
    shape: tuple[int, ...], begin: int, end: int, expected: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert [(r.start, r.shape) for r in rectangles(shape, begin, end)] == expected


@given(ranges())
def test_rectangles_of_a_range_hold_its_elements_in_order_and_are_few(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = rectangles(shape, begin, end)
    held = [int(number) for r in found for number in numbers[slices(r)].reshape(-1)]
    assert held == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert sum(r.numel for r in found) == end - begin


@given(nested())
@example(((2, 1, 3), Rectangle((0, 0, 0), (2, 1, 3)), Rectangle((0, 0, 1), (2, 1, 1))))
def test_what_two_rectangles_share_lies_in_each_where_its_runs_say(
    case: tuple[tuple[int, ...], Rectangle, Rectangle],
) -> None:
    shape, first, second = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    expected = sorted(set(numbers[slices(first)].reshape(-1)) & set(numbers[slices(second)].reshape(-1)))
    common = first.meet(second)
    assert common == second.meet(first)
    if common is None:
        assert expected == []
        return
    assert sorted(numbers[slices(common)].reshape(-1)) == expected
    for outer in (first, second, whole(shape)):
        own = numbers[slices(outer)].reshape(-1)
        runs = list(outer.runs_of(common))
        assert [int(n) for at, length in runs for n in own[at : at + length]] == [
            int(n) for n in numbers[slices(common)].reshape(-1)
        ]
        assert all(length > 0 for _, length in runs)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(runs))


@given(SHAPES, st.lists(st.integers(0, 1296), max_size=5))
def test_ranges_that_follow_one_another_cover_a_tensor(shape: tuple[int, ...], cuts: list[int]) -> None:
    numel = math.prod(shape)
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = [r for low, high in itertools.pairwise(bounds) for r in rectangles(shape, low, high)]
    assert cover_problem(shape, parts) is None
    assert cover_problem(shape, parts[::-1]) is None
    assert cover_problem(shape, parts[1:]) is not None
    assert cover_problem(shape, [*parts, parts[0]]) is not None


@given(SHAPES, st.data())
def test_a_cover_is_one_where_numpy_counts_each_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Parts that are cut anywhere, and then one of them moved, doubled or dropped."""
    parts = [whole(shape)]
    for _ in range(data.draw(st.integers(0, 4))):
        index = data.draw(st.integers(0, len(parts) - 1))
        part = parts[index]
        dims = [dim for dim, size in enumerate(part.shape) if size > 1]
        if not dims:
            continue
        dim = data.draw(st.sampled_from(dims))
        at = data.draw(st.integers(1, part.shape[dim] - 1))
        low = Rectangle(part.start, tuple(at if d == dim else n for d, n in enumerate(part.shape)))
        high = Rectangle(
            tuple(s + at if d == dim else s for d, s in enumerate(part.start)),
            tuple(n - at if d == dim else n for d, n in enumerate(part.shape)),
        )
        parts[index : index + 1] = [low, high]
    if data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(parts) - 1))
        start = tuple(
            data.draw(st.integers(0, full - size)) for full, size in zip(shape, parts[index].shape, strict=True)
        )
        parts[index] = Rectangle(start, parts[index].shape)
    counts = np.zeros(shape, dtype=int)
    for part in parts:
        counts[slices(part)] += 1
    assert (cover_problem(shape, parts) is None) == bool((counts == 1).all())
