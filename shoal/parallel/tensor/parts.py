"""Which elements of a dim a rank holds when it is split over the ranks. Pure arithmetic.

>>> [even_range(7, 2, rank) for rank in range(2)]
[(0, 3), (3, 7)]
>>> as_ranges([0, 1, 4], unit=8)
((0, 16), (32, 40))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # start, stop


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
