"""Ranges of bytes as a set: which bytes of a file hold something.

>>> written = Intervals()
>>> written.add(0, 10), written.add(10, 20), written.remove(4, 6)
(None, None, None)
>>> written.ranges
[(0, 4), (6, 20)]
>>> written.covers(6, 20), written.covers(0, 6)
(True, False)
>>> written.missing(2, 30)
[(4, 6), (20, 30)]
"""

from __future__ import annotations

from collections.abc import Iterable


def clipped(ranges: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of ranges that lie in [begin, end).

    >>> clipped([(0, 4), (6, 20)], 2, 10)
    [(2, 4), (6, 10)]
    """
    found = [(max(start, begin), min(stop, end)) for start, stop in ranges]
    return [(start, stop) for start, stop in found if start < stop]


class Intervals:
    """Half-open ranges, sorted, neither overlapping nor touching."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        kept = []
        for low, high in self.ranges:
            if high < start or low > stop:
                kept.append((low, high))
            else:
                start, stop = min(start, low), max(stop, high)
        self.ranges = sorted([*kept, (start, stop)])

    def remove(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        left = []
        for low, high in self.ranges:
            left += [(low, min(high, start)), (max(low, stop), high)]
        self.ranges = [(low, high) for low, high in left if low < high]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range that are not in the set."""
        left = Intervals()
        left.add(start, stop)
        for low, high in self.ranges:
            left.remove(low, high)
        return left.ranges

    def covers(self, start: int, stop: int) -> bool:
        """True if every byte of the range is in the set."""
        return start >= stop or any(low <= start and stop <= high for low, high in self.ranges)
