"""A flat range of a tensor as few rectangles, and how rectangles of two layouts intersect. Pure arithmetic: no tensors.

A rank owns a range of a flattened parameter. In a matrix that range is at most three rectangles: the end of its first
row, whole rows, the beginning of its last row.

    shape [4, 5], range 3..17         . . . # #        rows 0..1, columns 3..5
                                      # # # # #        rows 1..3, columns 0..5
                                      # # # # #
                                      # # . . .        rows 3..4, columns 0..2

>>> for r in rectangles((4, 5), 3, 17): print(r.start, r.shape)
(0, 3) (1, 2)
(1, 0) (2, 5)
(3, 0) (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

_FEW_DIMS = 5  # in which parts may be cut, however many they are
_MAX_CORNERS = 1 << 18  # of a tensor that is cut in more dims


@dataclass(frozen=True)
class Rectangle:
    """The elements ``[start, start + shape)`` of a tensor, in every dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Indices that take it out of the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def meet(self, other: Rectangle) -> Rectangle | None:
        """The intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Rectangle(start, tuple(high - low for low, high in zip(start, stop, strict=True)))

    def runs_of(self, inner: Rectangle) -> Iterator[tuple[int, int]]:
        """``inner`` as contiguous runs of this rectangle's own elements: (first element, number), in order."""
        if not self.shape:
            yield 0, 1
            return
        last = len(self.shape)  # dims from here on are taken whole: they lie in one run
        while last > 0 and inner.shape[last - 1] == self.shape[last - 1]:
            last -= 1
        whole = math.prod(self.shape[last:])
        if last == 0:
            yield 0, whole
            return
        length = inner.shape[last - 1] * whole
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        offset = [inner.start[dim] - self.start[dim] for dim in range(last)]
        position = [0] * (last - 1)
        while True:
            at = sum((offset[dim] + position[dim]) * strides[dim] for dim in range(last - 1))
            yield at + offset[last - 1] * strides[last - 1], length
            for dim in reversed(range(last - 1)):
                position[dim] += 1
                if position[dim] < inner.shape[dim]:
                    break
                position[dim] = 0
            else:
                return


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> tuple[Rectangle, ...]:
    """Elements ``[begin, end)`` of the flattened tensor, as rectangles in order.

    At most 2 (dims - 1) + 1 of them; none of an empty range.
    """
    if begin >= end:
        return ()
    if not shape:
        return (Rectangle((), ()),)
    if len(shape) == 1:
        return (Rectangle((begin,), (end - begin,)),)
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        return _in_row(shape, last, begin - last * row, end - last * row)
    parts: tuple[Rectangle, ...] = ()
    if begin < first * row:
        parts += _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        parts += (Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])),)
    if end > last * row:
        parts += _in_row(shape, last, 0, end - last * row)
    return parts


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> tuple[Rectangle, ...]:
    return tuple(Rectangle((row, *r.start), (1, *r.shape)) for r in rectangles(shape[1:], begin, end))


def whole(shape: tuple[int, ...]) -> Rectangle:
    """The tensor itself."""
    return Rectangle((0,) * len(shape), shape)


def cover_problem(shape: tuple[int, ...], parts: list[Rectangle]) -> str | None:
    """What is wrong if ``parts`` do not hold every element of a tensor exactly once; else None.

    The time grows with their number, whoever chose them. A rectangle is known by its corners: +1 at its start, -1 just
    past its end, and so on with alternating signs over the 2^dims of them. Summed up along every dim they give the
    rectangle back, so parts add up to the whole tensor exactly where their corners add up to the whole's.

        +---+-----+        the corners at (0, 2) are + and -, those at (3, 2) too: they cancel,
        |   |     |        and what remains are the four of the whole
        +---+-----+
    """
    for part in parts:
        if len(part.start) != len(shape) or len(part.shape) != len(shape):
            return f"a part has {len(part.shape)} dims, the tensor {len(shape)}"
        bounds = zip(part.start, part.shape, shape, strict=True)
        if any(low < 0 or size < 1 or low + size > full for low, size, full in bounds):
            return f"the part at {list(part.start)} of shape {list(part.shape)} is not inside {list(shape)}"
    num_covered, numel = sum(part.numel for part in parts), math.prod(shape)
    if num_covered != numel:
        return f"{num_covered} of {numel} elements are there"
    dims = [dim for dim, full in enumerate(shape) if any(part.shape[dim] != full for part in parts)]
    if len(dims) > _FEW_DIMS and len(parts) << len(dims) > _MAX_CORNERS:
        return f"it is cut in {len(dims)} dims into {len(parts)} parts"
    signs = [math.prod(choice) for choice in product((1, -1), repeat=len(dims))]
    corners: dict[tuple[int, ...], int] = {}
    for part, factor in (*((part, 1) for part in parts), (whole(shape), -1)):
        sides = [(part.start[dim], part.start[dim] + part.shape[dim]) for dim in dims]
        for corner, sign in zip(product(*sides), signs, strict=True):
            corners[corner] = corners.get(corner, 0) + sign * factor
    return "parts of it overlap" if dims and any(corners.values()) else None
