"""A sum over a parameter's elements whose bits do not depend on how ranks share the parameter.

Floating point addition depends on its order, so the order is fixed by the parameter alone: neighbours are added, then
neighbours of those, in a binary tree over the flattened parameter (zeros beyond its end). A rank adds up the subtrees
that lie wholly in its part; the few nodes at the part's edges, at most two a level, are exchanged, and every rank
finishes the same tree.

    elements   0 1 2 3 4 5 6 7        rank 0 owns [0, 5), rank 1 owns [5, 8)
    level 1    0-1 2-3  *  6-7        * spans both ranks
    level 2    0---3    *             rank 0 sends (2, 0) and (0, 4); rank 1 sends (0, 5) and (1, 3)
    level 3        0---7

>>> node_keys(0, 5, 8), node_keys(5, 8, 8)
([(0, 4), (2, 0)], [(0, 5), (1, 3)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Key = tuple[int, int]  # (level, index): the elements [index << level, (index + 1) << level)

CPU_CHUNK_LEVEL = 16  # 2^16 elements of two fp32 vectors stay in a core's cache
GPU_CHUNK_LEVEL = 24


def height(numel: int) -> int:
    """The level of the root of a tree over ``numel`` elements."""
    return (numel - 1).bit_length()


def node_keys(low: int, high: int, numel: int) -> list[Key]:
    """The largest subtrees within ``[low, high)`` of a tree over ``numel`` elements, by level."""
    if low >= high:
        return []
    keys, top, is_end = [], height(numel), high == numel
    for level in range(top):
        if low % 2:
            keys.append((level, low))
            low += 1
        if high % 2:
            if not is_end:
                keys.append((level, high - 1))
                high -= 1
            elif low < high:
                high += 1
        if low >= high:
            return keys
        low, high = low // 2, high // 2
    return [*keys, (top, 0)]


def _reduce(
    values: torch.Tensor, first: int, level: int, top: int, *, is_end: bool, into: dict[Key, torch.Tensor]
) -> torch.Tensor:
    """Add neighbours up to level ``top``; nodes without a neighbour here go ``into`` the result. Shape: [k, n] ->
    [k, 0 or 1].
    """
    while level < top and values.shape[1]:
        if first % 2:
            into[level, first] = values[:, 0]
            values, first = values[:, 1:], first + 1
        if values.shape[1] % 2:
            if is_end:
                values = torch.nn.functional.pad(values, (0, 1))
            else:
                into[level, first + values.shape[1] - 1] = values[:, -1]
                values = values[:, :-1]
        values = values[:, 0::2] + values[:, 1::2]
        first, level = first // 2, level + 1
    return values


def partial_sums(
    low: int, high: int, numel: int, values_of: Callable[[int, int], torch.Tensor], chunk_level: int
) -> list[torch.Tensor]:
    """The values of ``node_keys(low, high, numel)``, in that order. Shape: [k] each.

    Args:
        values_of: returns the values of elements ``[begin, end)``. Shape: [k, end - begin], fp32. Called in order,
            once for each chunk.
        chunk_level: chunks are subtrees of this level.
    """
    if low >= high:
        return []
    top = height(numel)
    sums: dict[Key, torch.Tensor] = {}
    chunk_level = min(chunk_level, top)
    roots, begin = [], low
    while begin < high:
        end = min(((begin >> chunk_level) + 1) << chunk_level, high)
        roots.append(_reduce(values_of(begin, end), begin, 0, chunk_level, is_end=end == numel, into=sums))
        begin = end
    skipped = 0 if roots[0].shape[1] else 1
    first = (low >> chunk_level) + skipped
    rest = _reduce(torch.cat(roots, dim=1), first, chunk_level, top, is_end=high == numel, into=sums)
    if rest.shape[1]:
        sums[top, 0] = rest[:, 0]
    return [sums[key] for key in sorted(sums)]


@dataclass(frozen=True)
class SumTree:
    """The additions that make one sum per parameter of the nodes that all ranks sent.

    A rank's vector has ``width`` values. ``pairs`` are rounds of additions: the sums of a round are appended to the
    values.
    """

    width: int
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # indices into the values
    roots: torch.Tensor  # [parameters]: where each parameter's sum is

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """Sums from the ranks' vectors. Shape: [size, width, k] -> [parameters, k]."""
        values = vectors.reshape(-1, vectors.shape[-1])
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        for left, right in self.pairs:
            values = torch.cat([values, values[left] + values[right]])
        return values[self.roots]


def plan_sums(parts: Sequence[Sequence[tuple[int, int]]], numels: Sequence[int], device: torch.device) -> SumTree:
    """Plan the additions for parameters of which each rank owns ``parts[rank][parameter]``.

    A rank's vector has, parameter by parameter, the nodes of its part. A parameter that no rank owns
    has the sum zero.

    Raises: ValueError: the parts of a parameter have a gap.
    """
    keys = [[node_keys(*part, numel) for part, numel in zip(row, numels, strict=True)] for row in parts]
    width = max(1, max(sum(map(len, row)) for row in keys))
    num_values = len(parts) * width
    nodes: list[dict[Key, int]] = [{} for _ in numels]
    for rank, row in enumerate(keys):
        place = rank * width
        for parameter, sent in enumerate(row):
            for key in sent:
                nodes[parameter][key] = place
                place += 1
    zero, num_values = num_values, num_values + 1
    rounds = []
    for level in range(max((height(n) for n in numels if n), default=0)):
        left, right = [], []
        for values, numel in zip(nodes, numels, strict=True):
            if not values or level >= height(numel):
                continue
            for index in sorted(index for at, index in values if at == level):
                if index % 2 and (level, index - 1) not in values:
                    raise ValueError(f"no rank owns elements {(index - 1) << level} to {index << level} of a parameter")
                if index % 2:
                    continue
                value = values[level, index]
                if (level, index + 1) in values:
                    left.append(value)
                    right.append(values[level, index + 1])
                    value, num_values = num_values, num_values + 1
                elif (index + 1) << level < numel:
                    raise ValueError(f"no rank owns elements from {(index + 1) << level} on of a parameter of {numel}")
                values[level + 1, index // 2] = value
        if left:
            rounds.append(
                (
                    torch.tensor(left, dtype=torch.int64, device=device),
                    torch.tensor(right, dtype=torch.int64, device=device),
                )
            )
    roots = [
        values.get((height(numel), 0), zero) if numel else zero for values, numel in zip(nodes, numels, strict=True)
    ]
    return SumTree(width, tuple(rounds), torch.tensor(roots, dtype=torch.int64, device=device))
