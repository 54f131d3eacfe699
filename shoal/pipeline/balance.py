"""Consecutive layers to pipeline stages: where each stage begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Where each stage begins, and the end: the first stages have one layer more.

    >>> uniform(10, 4)
    [0, 3, 6, 8, 10]
    """
    size, longer = divmod(num_layers, num_stages)
    return [stage * size + min(stage, longer) for stage in range(num_stages + 1)]


def balance(costs: Sequence[float] | Sequence[Sequence[float]], num_stages: int) -> list[int]:
    """Where each stage begins, and the end, so that the largest cost of a stage is the smallest possible.

    No stage is empty. Of the splits with that largest cost it is the one with the smallest sum of squares; of several,
    the one whose earlier stages are longer. DeepSpeed's ``partition_balanced`` splits models of equal blocks alike.

    Args:
        costs: of each layer; or for each stage, those of each layer in it. At least as many layers as stages.

    >>> balance([1, 1, 1, 1, 4], 2), balance([1] * 10, 4)
    ([0, 4, 5], [0, 3, 6, 8, 10])
    >>> balance([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    [0, 1, 4]
    """
    is_by_stage = isinstance(costs[0], Sequence)
    by_stage = cast("Sequence[Sequence[float]]", costs if is_by_stage else [costs] * num_stages)
    sums = [list(accumulate(layer_costs, initial=0.0)) for layer_costs in by_stage]
    largest, _ = _best(sums, lambda total, cost: max(total, cost))
    _, bounds = _best(sums, lambda total, cost: total + cost * cost if cost <= largest else _NONE)
    return bounds


_NONE = float("inf")  # there is no such split


def _best(sums: Sequence[Sequence[float]], add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The split with the smallest total, by dynamic programming; ``add`` gives the total with one more stage."""
    num_layers = len(sums[0]) - 1
    best = [0.0] + [_NONE] * num_layers  # by how many layers the stages so far have
    begins: list[list[int]] = []
    for of_stage in sums:
        totals = [(_NONE, 0)]
        for end in range(1, num_layers + 1):
            totals.append(min((add(best[start], of_stage[end] - of_stage[start]), -start) for start in range(end)))
        best = [total for total, _ in totals]
        begins.append([-start for _, start in totals])
    bounds = [num_layers]
    for starts in reversed(begins):
        bounds.append(starts[bounds[-1]])
    return best[-1], bounds[::-1]
