"""Which elements of a parameter a rank holds when one dim is split over the ranks. Pure arithmetic, and slices.

>>> [even_range(7, 2, rank) for rank in range(2)]
[(0, 3), (3, 7)]
>>> as_ranges([0, 1, 4], unit=8)
((0, 16), (32, 40))
>>> Part((48, 16), 0, ((0, 16), (32, 40))).shape
(24, 16)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.sharding.parts import take

Range = tuple[int, int]  # start, stop

_READ_NUMEL = 4 << 20


@dataclass(frozen=True)
class Part:
    """The elements of a whole parameter that this rank holds: ranges of one dim, concatenated along it.

    The parts of all ranks are disjoint and cover the parameter.

    Args:
        global_shape: the shape of the whole parameter.
        dim: the dim that is split.
        ranges: start and stop on ``dim``, in the order in which the rank holds them; several where a fused parameter
            (query, key and value; gate and up) is split inside each of its blocks.
    """

    global_shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor."""
        shape = list(self.global_shape)
        shape[self.dim] = length(self.ranges)
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of ``whole``: a view where there is one range, else a copy."""
        return take(whole, self.dim, self.ranges)

    def read(self, read_range: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """This part of a tensor that is read by ranges of its flattened elements, as from a file.

        Args:
            read_range: elements [begin, end) of the whole tensor, 1-D.

        Memory: this part; with it, where another dim than the first is split, at most 4 Mi elements of the whole tensor
            or one of its rows.
        """
        outer, size = math.prod(self.global_shape[: self.dim]), self.global_shape[self.dim]
        inner = math.prod(self.global_shape[self.dim + 1 :])
        if outer == 1:
            return torch.cat([read_range(start * inner, stop * inner) for start, stop in self.ranges]).view(self.shape)
        rows = max(1, _READ_NUMEL // (size * inner))
        pieces = []
        for row in range(0, outer, rows):
            block = read_range(row * size * inner, min(row + rows, outer) * size * inner).view(-1, size, inner)
            pieces.append(take(block, 1, self.ranges).clone())
        return torch.cat(pieces).view(self.shape)


def even_range(numel: int, size: int, rank: int) -> Range:
    """The range of ``rank`` when ``numel`` elements are split over ``size`` ranks; lengths differ by one at most."""
    return rank * numel // size, (rank + 1) * numel // size


def even_ranges(blocks: Sequence[int], size: int, rank: int) -> tuple[Range, ...]:
    """The ranges of ``rank`` when every one of the concatenated ``blocks`` is split over ``size`` ranks."""
    ranges, offset = [], 0
    for block in blocks:
        start, stop = even_range(block, size, rank)
        ranges.append((offset + start, offset + stop))
        offset += block
    return tuple(ranges)


def as_ranges(indices: Iterable[int], *, unit: int) -> tuple[Range, ...]:
    """The ranges that the units with these indices are, each ``unit`` elements long; neighbours are merged."""
    ranges: list[Range] = []
    for index in indices:
        start = index * unit
        if ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], start + unit
        else:
            ranges.append((start, start + unit))
    return tuple(ranges)


def length(ranges: Iterable[Range]) -> int:
    """The number of elements in all ranges."""
    return sum(stop - start for start, stop in ranges)
