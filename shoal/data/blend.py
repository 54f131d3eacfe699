"""Which source each position of a stream of samples comes from, by weights, found without a history.

Sources are the leaves of a binary tree. Of n samples that reach a node, floor(n * left / (left + right) + 1/2) go to
the left child and the others to the right one; so the path of position n, and how many samples of each source come
before it, are found in as many steps as the tree has levels. Weights 3, 1 and 2:

    >>> blend = Blend(["a", "b", "c"], [30, 30, 30], weights=[3, 1, 2], epochs=[1, 1, 1])
    >>> blend.locate(range(12)).source.tolist()
    [0, 2, 0, 1, 0, 2, 0, 2, 0, 1, 0, 2]
    >>> blend.counts(12)
    [6, 2, 4]
    >>> blend.num_samples  # then the next would be the 31st of a
    60

After a change of weights the counts go on from where they are: what was taken is not taken again.

    >>> blend.change(12, [0, 1, 1])
    >>> blend.locate(range(12, 16)).rank.tolist(), blend.counts(16)
    ([2, 4, 3, 5], [6, 4, 6])
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.order import Indices
from shoal.errors import UsageError

_LARGEST_SUM = 2**31  # of weights: products of two fit 64 bits


class Located(NamedTuple):
    """For each of some positions its source, the epoch of that source, and the number in the epoch."""

    source: Indices
    epoch: Indices
    rank: Indices


class WeightChange(NamedTuple):
    """Weights from a position on, and the samples of each source before it."""

    position: int
    weights: tuple[int, ...]
    taken: tuple[int, ...]


class Blend:
    """Sources of ``sizes`` samples, mixed.

    Args:
        names: of the sources, for messages.
        weights: of the sources, by samples; only their ratios count. None: by the samples that each may give, so that
            all end together.
        epochs: how often each source may be read, also in part (0.5); None: without limit.
        num_samples: that will be asked for; None: as many as the epochs allow (without limits, as the sources have).

    Raises: UsageError: weights that are no weights, or a source that would be read more often than it may be.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
        epochs: Sequence[float | None] | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._names = list(names)
        self._sizes = np.array(sizes, dtype=np.int64)
        times = [1.0] * len(sizes) if epochs is None else list(epochs)
        self._limits = [
            None if time is None else math.floor(size * time) for size, time in zip(sizes, times, strict=True)
        ]
        if weights is None:
            weights = [size if most is None else most for size, most in zip(sizes, self._limits, strict=True)]
        self._asked = num_samples
        self.changes = [WeightChange(0, self._whole(weights), (0,) * len(sizes))]
        self._check()

    @property
    def num_samples(self) -> int:
        """Samples until a source would be read more often than it may be, or as many as were asked for."""
        return self._most() if self._asked is None else self._asked

    def locate(self, positions: npt.ArrayLike) -> Located:
        """Where the samples at these positions come from. Shape: that of ``positions``, flat."""
        places = np.asarray(positions, dtype=np.int64).reshape(-1)
        source, rank = np.zeros_like(places), np.zeros_like(places)
        which = np.searchsorted([change.position for change in self.changes], places, side="right") - 1
        for number in np.unique(which):
            change, mask = self.changes[number], which == number
            sources, ranks = _descend(places[mask] - change.position, change.weights)
            source[mask], rank[mask] = sources, ranks + np.array(change.taken, dtype=np.int64)[sources]
        epoch, index = np.divmod(rank, self._sizes[source])
        return Located(source, epoch, index)

    def counts(self, position: int) -> list[int]:
        """The samples of each source before ``position``."""
        change = self.changes[bisect_right(self.changes, position, key=lambda change: change.position) - 1]
        new = _split(position - change.position, change.weights)
        return [before + more for before, more in zip(change.taken, new, strict=True)]

    def change(self, position: int, weights: Sequence[float]) -> None:
        """Mix by other weights from ``position`` on. Later changes are forgotten.

        Raises: UsageError: as at construction; then nothing has changed.
        """
        before = self.changes
        taken = tuple(self.counts(position))
        kept = [change for change in before if change.position < position]
        self.changes = [*kept, WeightChange(position, self._whole(weights), taken)]
        try:
            self._check()
        except UsageError:
            self.changes = before
            raise

    def _whole(self, weights: Sequence[float]) -> tuple[int, ...]:
        """Whole numbers of the same ratios, whose sum is small enough."""
        if len(weights) != len(self._names) or min(weights, default=0) < 0 or not 0 < sum(weights) < math.inf:
            raise UsageError(
                f"weights {list(weights)} for {len(self._names)} sources.",
                where="blend",
                do="give each source a weight of 0 or more, and one of them more than 0.",
                code="data-blend",
            )
        if all(float(weight).is_integer() for weight in weights):
            divisor = math.gcd(*map(int, weights))
            whole = [int(weight) // divisor for weight in weights]
            if sum(whole) <= _LARGEST_SUM:
                return tuple(whole)
        scale = _LARGEST_SUM / 2 / sum(weights)
        return tuple(max(round(weight * scale), 1) if weight else 0 for weight in weights)

    def _most(self) -> int:
        """The largest position up to which no source has given more than it may."""
        *_, last = self.changes
        ends = [
            last.position + max(limit - taken, 0) * sum(last.weights) // weight + len(self._names) * sum(last.weights)
            for limit, weight, taken in zip(self._limits, last.weights, last.taken, strict=True)
            if limit is not None and weight
        ]
        if not ends:
            return max(int(self._sizes.sum()), last.position)
        return bisect_right(range(min(ends) + 1), 0, lo=last.position, key=self._is_over) - 1

    def _is_over(self, position: int) -> int:
        """1 if some source has given more than it may before ``position``, else 0."""
        counts = zip(self.counts(position), self._limits, strict=True)
        return int(any(limit is not None and count > limit for count, limit in counts))

    def _check(self) -> None:
        most = self._most()
        if (self._asked is None and most > 0) or (self._asked is not None and self._asked <= most):
            return
        asked = self._asked or 1
        lines = [
            f"{name}: {count} of {size} samples ({count / size:.2f} epochs), at most {limit}"
            for name, count, size, limit in zip(self._names, self.counts(asked), self._sizes, self._limits, strict=True)
            if limit is not None and count > limit
        ]
        raise UsageError(
            f"a blend of {asked} samples reads sources more often than their epochs allow: {'; '.join(lines)}.",
            where="blend",
            do=f"allow these sources more epochs, give them less weight, or ask for at most {most} samples.",
            code="data-blend",
        )


def _share(num: Indices, left: int, both: int) -> Indices:
    """How many of the first ``num`` samples of a node go to its left child."""
    rounds, rest = np.divmod(num, both)
    share: Indices = rounds * left + (rest * left + both // 2) // both
    return share


def _descend(places: Indices, weights: Sequence[int]) -> tuple[Indices, Indices]:
    """The source of each place, and its number among the samples of that source."""
    if len(weights) == 1:
        return np.zeros_like(places), places
    middle = len(weights) // 2
    left, both = sum(weights[:middle]), sum(weights)
    if left in (0, both):  # one child gets all
        part = slice(middle, None) if left == 0 else slice(middle)
        source, rank = _descend(places, weights[part])
        return source + (middle if left == 0 else 0), rank
    before = _share(places, left, both)
    is_left = _share(places + 1, left, both) > before
    source, rank = np.zeros_like(places), np.zeros_like(places)
    source[is_left], rank[is_left] = _descend(before[is_left], weights[:middle])
    others, ranks = _descend((places - before)[~is_left], weights[middle:])
    source[~is_left], rank[~is_left] = others + middle, ranks
    return source, rank


def _split(num: int, weights: Sequence[int]) -> list[int]:
    """Of ``num`` samples, those of each source."""
    if len(weights) == 1:
        return [num]
    middle = len(weights) // 2
    left, both = sum(weights[:middle]), sum(weights)
    share = int(_share(np.array(num, dtype=np.int64), left, both)) if both else 0
    return _split(share, weights[:middle]) + _split(num - share, weights[middle:])
