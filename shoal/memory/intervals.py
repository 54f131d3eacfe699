"""Ranges of bytes as a set: which bytes of a file hold something.

>>> written = Intervals()
>>> written.add(0, 10), written.add(10, 20), written.remove(4, 6)
(None, None, None)
>>> written.ranges
[(0, 4), (6, 20)]
>>> written.covers(6, 20), written.covers(0, 6)
(True, False)
"""

from __future__ import annotations


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

    def covers(self, start: int, stop: int) -> bool:
        """Is every byte of the range in the set?"""
        return start >= stop or any(low <= start and stop <= high for low, high in self.ranges)
