"""Which experts change ranks so that the ranks have equal loads. Arithmetic only.

    placement     ids of the experts by rank:   rank 0: 0 1 2 3      rank 1: 4 5 6 7
    loads         tokens by expert:             9 9 1 1              1 1 1 1
    new placement                               rank 0: 4 1 2 3      rank 1: 0 5 6 7

An expert changes its rank, never its place among the experts of a rank: the same range of every flat buffer moves, so
that ranks which shard it alike exchange it among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

Placement = tuple[tuple[int, ...], ...]

_WORTH_A_COPY = 0.1  # a copy is sent in every forward; a smaller excess over the mean costs less


def plan_placement(loads: Sequence[float], placement: Placement, *, tolerance: float = 0.02) -> Placement:
    """Exchange experts between the most loaded rank and others, the best exchange first, until none helps.

    Args:
        loads: by expert.
        placement: the present one: ids of the experts by rank, equally many on each.
        tolerance: a most loaded rank that exceeds the mean by at most this share is left as it is.

    Returns: the new placement. Every rank that calls this with the same arguments gets the same.

    >>> plan_placement([9, 9, 1, 1, 1, 1, 1, 1], ((0, 1, 2, 3), (4, 5, 6, 7)))
    ((4, 1, 2, 3), (0, 5, 6, 7))
    """
    ids = [list(own) for own in placement]
    totals = [sum(loads[expert] for expert in own) for own in ids]
    limit = (1 + tolerance) * sum(totals) / len(totals)
    while max(totals) > limit:
        first = totals.index(max(totals))
        most, other, place = min(
            (max(totals[first] - gap, totals[rank] + gap), rank, place)
            for place, expert in enumerate(ids[first])
            for rank in range(len(ids))
            for gap in [loads[expert] - loads[ids[rank][place]]]
        )
        if most >= totals[first]:
            break
        gap = loads[ids[first][place]] - loads[ids[other][place]]
        totals[first], totals[other] = totals[first] - gap, totals[other] + gap
        ids[first][place], ids[other][place] = ids[other][place], ids[first][place]
    return tuple(map(tuple, ids))


def plan_copies(loads: Sequence[float], placement: Placement, max_copies: int) -> tuple[tuple[int, ...], Placement]:
    """Choose experts that every rank gets a copy of, so that each computes its own tokens of them.

    The most loaded expert is copied as long as the rest, exchanged by :func:`plan_placement`, leave a rank whose load
    exceeds the mean by more than ``_WORTH_A_COPY``.

    Returns: the copied experts, and the placement of all.

    >>> plan_copies([90, 2, 2, 2], ((0, 1), (2, 3)), 1)
    ((0,), ((0, 1), (2, 3)))
    """
    rest = list(loads)
    copied: list[int] = []
    while True:
        planned = plan_placement(rest, placement)
        totals = [sum(rest[expert] for expert in own) for own in planned]
        excess = max(totals) - sum(totals) / len(totals)
        if len(copied) == max_copies or excess * len(totals) <= _WORTH_A_COPY * sum(loads):
            return tuple(copied), planned
        copied.append(max(range(len(rest)), key=rest.__getitem__))
        rest[copied[-1]] = 0.0


def most_loaded(loads: Sequence[float], placement: Placement) -> float:
    """The load of the most loaded rank over the mean of the ranks; 1 where they are equal, or have none.

    >>> most_loaded([9, 9, 1, 1], ((0, 1), (2, 3)))
    1.8
    """
    totals = [sum(loads[expert] for expert in own) for own in placement]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def num_moved(before: Placement, after: Placement) -> int:
    """How many experts change ranks."""
    return sum(a != b for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
