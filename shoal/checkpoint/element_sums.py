"""A checksum of a global tensor that does not depend on how it is divided: a sum over its elements.

    (sum of bits(x[i]),  sum of i * bits(x[i]))      modulo 2^32, i: the index in the flattened global tensor

Rectangles of the tensor are summed where they are, and their sums added: one rank with the whole tensor and many ranks
with parts of it get the same numbers. An element that changed, or lies at another index, changes them. Unlike the sums
of a file's blocks they are of the values that a run has, before they are written and after they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shoal.checkpoint.rectangles import Rectangle

_MODULUS = 1 << 32
_AT_ONCE = 1 << 18  # elements whose sums are taken in one operation, so that what it allocates stays in the cache
_WIDTH = 1024  # elements of a row into which a flat range is divided

Sums = tuple[int, int]
NOTHING: Sums = (0, 0)


def added(one: Sums, other: Sums) -> Sums:
    return (one[0] + other[0]) % _MODULUS, (one[1] + other[1]) % _MODULUS


def element_sums(values: torch.Tensor, rectangle: Rectangle, shape: Sequence[int]) -> Sums:
    """Of the elements of one rectangle of a tensor of ``shape``.

    Args:
        values: the rectangle's elements in order, 1-D and contiguous.

    Memory: eight bytes for each element of a row and of a column of the rectangle.
    Order: blocks the host until the values are there.
    """
    sums = NOTHING
    for begin, numel, base, stride in _rows(rectangle, shape):
        sums = added(sums, _of_rows(values[begin : begin + numel], base, stride))
    return sums


def _rows(rectangle: Rectangle, shape: Sequence[int]) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """The rectangle as matrices: (first element, elements, index of the first one, (columns, index to index of a row)).

    >>> list(_rows(Rectangle((1, 2), (2, 3)), (4, 6)))
    [(0, 6, 8, (3, 6))]
    """
    last = len(shape)  # dims from here on are whole, so they are one with the dim before
    while last > 1 and rectangle.shape[last - 1] == shape[last - 1]:
        last -= 1
    inner = math.prod(shape[last:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    columns = inner * (rectangle.shape[last - 1] if shape else 1)
    base = sum(start * stride for start, stride in zip(rectangle.start, strides, strict=True))
    if last <= 1:
        yield 0, columns, base, (0, 0)
        return
    rows, outer = rectangle.shape[last - 2], rectangle.shape[: last - 2]
    for number in range(math.prod(outer)):
        at, rest = base, number
        for dim in reversed(range(last - 2)):
            rest, position = divmod(rest, outer[dim])
            at += position * strides[dim]
        yield number * rows * columns, rows * columns, at, (columns, strides[last - 2])


def _of_rows(flat: torch.Tensor, base: int, stride: tuple[int, int]) -> Sums:
    """Of a matrix, or with a stride of 0 of one range of indices."""
    columns, step = stride
    if step == 0:
        whole = flat.numel() // _WIDTH * _WIDTH
        sums = _of_rows(flat[:whole], base, (_WIDTH, _WIDTH)) if whole else NOTHING
        rest = flat[whole:]
        return added(sums, _of_rows(rest, base + whole, (rest.numel(), rest.numel()))) if rest.numel() else sums
    bits = _bits(flat).view(-1, columns)
    once = max(_AT_ONCE // columns, 1)
    total, by_place = (
        torch.zeros((), dtype=torch.int64, device=flat.device) for _ in range(2)
    )  # read once, at the end
    by_column = torch.zeros(columns, dtype=torch.int64, device=flat.device)
    for row in range(0, len(bits), once):
        part = bits[row : row + once].to(torch.int32)
        by_row = part.sum(1, dtype=torch.int32).long()
        by_column += part.sum(0, dtype=torch.int32)
        total += by_row.sum()
        by_place += (by_row * _range(row, len(part), flat.device)).sum()
    in_columns = (by_column * _range(0, columns, flat.device)).sum()  # wraps at 2^64, a multiple of the modulus
    plain = int(total)
    return plain % _MODULUS, (base * plain + step * int(by_place) + int(in_columns)) % _MODULUS


def _range(begin: int, numel: int, device: torch.device) -> torch.Tensor:
    return torch.arange(begin, begin + numel, device=device)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer; of one of eight bytes or more its words, each with its own factor."""
    if flat.element_size() > 4:
        words = flat.view(torch.int32).view(flat.numel(), -1)
        return sum((2 * index + 1) * words[:, index] for index in range(words.shape[1]))  # type: ignore[return-value]
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()])
