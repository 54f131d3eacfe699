"""Consecutive layers to pipeline stages: where each stage begins."""

from __future__ import annotations

from collections.abc import Sequence
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

    No stage is empty. Of several splits with that cost, the one with fewer layers in the later stages' predecessors:
    each stage, from the last to the first, takes as many layers as it can.

    Args:
        costs: of each layer; or for each stage, those of each layer in it. At least as many layers as stages.

    >>> balance([1, 1, 1, 1, 4], 2)
    [0, 4, 5]
    >>> balance([[3, 3, 3, 3], [1, 1, 1, 1]], 2)
    [0, 1, 4]
    """
    is_by_stage = bool(costs) and isinstance(costs[0], Sequence)
    by_stage = cast("Sequence[Sequence[float]]", costs if is_by_stage else [costs] * num_stages)
    count = len(by_stage[0])
    # best[i]: the largest cost when the stages so far have the first i layers
    best = [0.0] + [float("inf")] * count
    begins: list[list[int]] = []
    for layer_costs in by_stage:
        sums = list(accumulate(layer_costs, initial=0.0))
        splits = [(float("inf"), 0)]
        for end in range(1, count + 1):
            splits.append(min((max(best[start], sums[end] - sums[start]), start) for start in range(end)))
        best = [cost for cost, _ in splits]
        begins.append([start for _, start in splits])
    bounds = [count]
    for starts in reversed(begins):
        bounds.append(starts[bounds[-1]])
    return bounds[::-1]
