"""Which elements of a dim a rank has when it is split over the ranks, and rows that several ranks need.

>>> [even_range(7, 2, rank) for rank in range(2)]
[(0, 3), (3, 7)]
>>> as_ranges([0, 1, 4], unit=8)
((0, 16), (32, 40))

Key-value heads to which several ranks attend are shared: each rank computes a part of them, and their outputs are
gathered.

    fused, 4 query heads, 1 key, 1 value head, head size 2      rows of [q0 q1 q2 q3 k v]: 0..8 query, 8..12 shared
    rank 0 holds rows (0, 4) and (8, 10): q0 q1 and k;          it computes q0 q1 k, gathers k v, and returns q0 q1 k v
    rank 1 holds rows (4, 8) and (10, 12): q2 q3 and v;         it computes q2 q3 v, gathers k v, and returns q2 q3 k v

So no row is on two ranks, and the gradient of a row is whole on the rank that holds it.

>>> rows = SharedRows.of(((0, 4), (8, 12)), ((8, 12),), size=2, rank=0)
>>> rows.held, rows.own, rows.pieces
(((0, 4), (8, 10)), ((4, 6),), ((False, ((0, 4),)), (True, ((0, 4),))))

Source: Megatron-LM, for fewer query groups than ranks (arXiv:1909.08053, its later versions).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.sharding.parts import take

Range = tuple[int, int]  # start, stop
Ranges = tuple[Range, ...]


def even_range(numel: int, size: int, rank: int) -> Range:
    """The range of ``rank`` when ``numel`` elements are split over ``size`` ranks; lengths differ by one at most."""
    return rank * numel // size, (rank + 1) * numel // size


def even_ranges(blocks: Sequence[int], size: int, rank: int) -> Ranges:
    """The ranges of ``rank`` when every one of the concatenated ``blocks`` is split over ``size`` ranks."""
    ranges, offset = [], 0
    for block in blocks:
        start, stop = even_range(block, size, rank)
        ranges.append((offset + start, offset + stop))
        offset += block
    return tuple(ranges)


def as_ranges(indices: Iterable[int], *, unit: int) -> Ranges:
    """The ranges that the units with these indices are, each ``unit`` elements long; neighbours are merged."""
    return merged((index * unit, (index + 1) * unit) for index in indices)


def merged(ranges: Iterable[Range]) -> Ranges:
    """``ranges`` in their order, neighbours that touch merged."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result)


def length(ranges: Iterable[Range]) -> int:
    """The number of elements in all ranges."""
    return sum(stop - start for start, stop in ranges)


@dataclass(frozen=True)
class SharedRows:
    """What one rank holds, computes and returns of a projection with shared heads.

    Args:
        held: the rows of the weight that it holds, ascending.
        own: which of its outputs are a part of the shared ones.
        widths: the shared outputs of every rank.
        pieces: the outputs that it returns, in order: of the gathered ones (True) or of its own.
    """

    held: Ranges
    own: Ranges
    widths: tuple[int, ...]
    pieces: tuple[tuple[bool, Ranges], ...]

    @classmethod
    def of(cls, returned: Ranges, shared: Ranges, *, size: int, rank: int) -> SharedRows:
        """Split the shared rows evenly.

        Args:
            returned: the rows whose outputs this rank returns.
            shared: the rows of all heads that ranks share, ascending.
        """
        spans = [even_range(length(shared), size, each) for each in range(size)]
        share = window(shared, *spans[rank])
        runs = [run for start, stop in returned for run in _cut(start, stop, shared)]
        held = tuple(sorted({run for is_shared, run in runs if not is_shared} | set(share)))
        pieces: list[tuple[bool, Ranges]] = []
        for is_shared, run in runs:
            places = _places(shared if is_shared else held, *run)
            if pieces and pieces[-1][0] == is_shared:
                places = pieces.pop()[1] + places
            pieces.append((is_shared, places))
        own = tuple(place for start, stop in share for place in _places(held, start, stop))
        return cls(held, own, tuple(stop - start for start, stop in spans), tuple(pieces))

    def complete(self, output: torch.Tensor, comm: Communicator, label: autograd.Label) -> torch.Tensor:
        """The outputs of this rank's heads from those of the rows that it holds. Shape: [..., held] -> [..., returned].

        Communicates: forward an all_gather of the shared outputs, backward a reduce_scatter of their gradients.
        """
        share, width = take(output, -1, self.own), max(self.widths)
        if len(set(self.widths)) > 1:
            share = F.pad(share, (0, width - share.shape[-1]))
        whole = autograd.all_gather(share, comm, dim=-1, label=label)
        if len(set(self.widths)) > 1:
            whole = take(whole, -1, [(rank * width, rank * width + own) for rank, own in enumerate(self.widths)])
        return torch.cat([take(whole if is_shared else output, -1, ranges) for is_shared, ranges in self.pieces], -1)


def window(ranges: Sequence[Range], begin: int, end: int) -> Ranges:
    """The elements ``begin`` to ``end`` of the concatenated ranges."""
    result, offset = [], 0
    for start, stop in ranges:
        low, high = max(begin - offset, 0), min(end - offset, stop - start)
        if low < high:
            result.append((start + low, start + high))
        offset += stop - start
    return tuple(result)


def _cut(start: int, stop: int, shared: Ranges) -> list[tuple[bool, Range]]:
    """The runs of shared (True) and of other rows in ``start`` to ``stop``."""
    bounds = sorted({start, stop, *(min(max(edge, start), stop) for each in shared for edge in each)})
    return [(any(begin <= low < end for begin, end in shared), (low, high)) for low, high in pairwise(bounds)]


def _places(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Where the rows ``start`` to ``stop`` are in the concatenated ranges."""
    result, offset = [], 0
    for low, high in ranges:
        begin, end = max(start, low), min(stop, high)
        if begin < end:
            result.append((offset + begin - low, offset + end - low))
        offset += high - low
    return tuple(result)
