"""Heads for positions and back: each rank computes attention over the whole sequence, for some of the heads.

Before attention a rank has all heads at some positions, afterwards it has the same again; in between it has all
positions of some heads. One all-to-all moves queries, keys and values together, one more the output:

    [B, H, L / P, E], [B, K, L / P, E] twice  ->  [B, H / P, L, E], [B, K / P, L, E] twice  ->  [B, H / P, L, F]
                                                                                          ->  [B, H, L / P, F]

The paper counts four all-to-alls forward a layer, of queries, keys, values and the output: the same bytes in two.

Heads need not divide by the ranks: parts are nearly equal. A rank gets the heads of keys and values that its queries
attend to; with fewer of them than ranks, one head goes to several ranks, and its gradient is their sum.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Communicator
from shoal.comm.wire import RowBytes
from shoal.compiler import untraced
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import cuts
from shoal.parallel.sequence.kernels import HeadGroups


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank computes.

    Args:
        queries, keys: the heads of each rank, of queries and of keys and values; ranks may share those of keys.

    >>> split_heads(7, 1, 2)
    HeadSplit(queries=(range(0, 4), range(4, 7)), keys=(range(0, 1), range(0, 1)))
    >>> split_heads(6, 3, 4).keys
    (range(0, 1), range(1, 2), range(2, 3), range(2, 3))
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    def key_of_query(self, rank: int) -> list[int]:
        """For each head of queries of ``rank`` the head of keys that it attends to, counted in those of ``rank``.

        >>> split_heads(12, 3, 2).key_of_query(0)
        [0, 0, 0, 0, 1, 1]
        """
        group = self.queries[-1].stop // self.keys[-1].stop
        return [head // group - self.keys[rank].start for head in self.queries[rank]]

    def groups(self, rank: int) -> HeadGroups:
        """Heads of queries of ``rank`` and those of keys that they share evenly: at most three pairs, which are all.

        >>> split_heads(12, 3, 2).groups(0)
        ((range(0, 4), range(0, 1)), (range(4, 6), range(1, 2)))
        """
        of_query = self.key_of_query(rank)
        groups = []
        for size, shared in groupby(range(len(self.keys[rank])), key=of_query.count):
            keys = list(shared)
            first = of_query.index(keys[0])
            groups.append((range(first, first + size * len(keys)), range(keys[0], keys[-1] + 1)))
        return tuple(groups)


def split_heads(heads: int, key_heads: int, ranks: int) -> HeadSplit:
    """Nearly equal parts of the heads.

    Raises: UsageError: fewer heads than ranks, or heads of keys that do not divide the heads.
    """
    check_heads(heads, key_heads)
    if heads < ranks:
        raise UsageError(
            f"{heads} attention heads cannot be spread over {ranks} ranks of the axis 'sp'",
            do=f"use sp={heads} or less, and context parallelism (cp) for the other ranks.",
            code="sequence-heads",
        )
    queries = tuple(range(start, stop) for start, stop in pairwise(cuts(heads, ranks)))
    group = heads // key_heads
    return HeadSplit(queries, tuple(range(part.start // group, (part.stop - 1) // group + 1) for part in queries))


def check_heads(heads: int, key_heads: int) -> None:
    """Raises: UsageError: heads of keys that do not divide the heads of queries."""
    if not key_heads or heads % key_heads:
        raise UsageError(
            f"{heads} heads of queries cannot share {key_heads} heads of keys and values",
            do="give keys and values a number of heads that divides the queries'.",
            code="sequence-heads",
        )


@dataclass(frozen=True)
class HeadExchange:
    """Moves tensors between all heads at some positions and some heads at all positions.

    Args:
        lengths: the positions of each rank.
        head_dim, sequence_dim: of the tensors.
        wire: the format in which they are sent, the elements of each head at each position by themselves; None: as they
            are. The last dim is neither that of heads nor that of positions then.
    """

    comm: Communicator
    lengths: tuple[int, ...]
    head_dim: int = 1
    sequence_dim: int = 2
    wire: WireFormat | None = None

    @untraced
    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[tuple[range, ...]], label: str) -> tuple[Tensor, ...]:
        """This rank's heads of ``tensors`` at all positions.

        Args:
            heads: of each tensor, those of each rank; ranks may share some.

        Communicates: one all-to-all; one in backward.
        """
        moved: tuple[Tensor, ...] = _HeadExchange.apply(self, tuple(heads), True, label, *tensors)
        return moved

    @untraced
    def to_positions(self, tensor: Tensor, heads: tuple[range, ...], label: str) -> Tensor:
        """All heads of ``tensor``, which has this rank's of all positions, at this rank's positions.

        Communicates: one all-to-all; one in backward.
        """
        moved: tuple[Tensor] = _HeadExchange.apply(self, (heads,), False, label, tensor)
        return moved[0]

    def send_heads(self, tensors: Sequence[Tensor], heads: Sequence[tuple[range, ...]], label: str) -> list[Tensor]:
        ranks = range(self.comm.size)
        parts = [self._of_rank(tensors, heads, rank) for rank in ranks]
        outs = [
            tensor.new_empty(self._shape(tensor, len(of[self.comm.rank]), sum(self.lengths)))
            for tensor, of in zip(tensors, heads, strict=True)
        ]
        places = [out.split(list(self.lengths), self.sequence_dim) for out in outs]
        self._all_to_all(parts, [[of[rank] for of in places] for rank in ranks], label, accumulate=False)
        return outs

    def send_positions(self, tensors: Sequence[Tensor], heads: Sequence[tuple[range, ...]], label: str) -> list[Tensor]:
        """The inverse of :meth:`send_heads`; what several ranks have of one head is summed."""
        ranks = range(self.comm.size)
        split = [tensor.split(list(self.lengths), self.sequence_dim) for tensor in tensors]
        length = self.lengths[self.comm.rank]
        is_shared = any(one.stop > other.start for of in heads for one, other in pairwise(of))
        shapes = [self._shape(tensor, of[-1].stop, length) for tensor, of in zip(tensors, heads, strict=True)]
        outs = [
            tensor.new_zeros(shape) if is_shared else tensor.new_empty(shape)
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        places = [self._of_rank(outs, heads, rank) for rank in ranks]
        self._all_to_all([[of[rank] for of in split] for rank in ranks], places, label, accumulate=is_shared)
        return outs

    def _of_rank(self, tensors: Sequence[Tensor], heads: Sequence[tuple[range, ...]], rank: int) -> list[Tensor]:
        """Views of the tensors' heads of ``rank``."""
        return [
            tensor.narrow(self.head_dim, of[rank].start, len(of[rank]))
            for tensor, of in zip(tensors, heads, strict=True)
        ]

    def _shape(self, tensor: Tensor, heads: int, positions: int) -> list[int]:
        shape = list(tensor.shape)
        shape[self.head_dim], shape[self.sequence_dim] = heads, positions
        return shape

    def _all_to_all(
        self, parts: list[list[Tensor]], places: list[list[Tensor]], label: str, *, accumulate: bool
    ) -> None:
        """Send ``parts[rank]`` to each rank, and write what it sends into ``places[rank]``."""
        sent, received = ([sum(part.numel() for part in some) for some in each] for each in (parts, places))
        like = parts[0][0]
        source = self.comm.empty(sum(sent), like.dtype, like.device)
        out = torch.empty(sum(received), dtype=like.dtype, device=like.device)
        for view, part in _views(source, parts):
            view.copy_(part)
        if self.wire is None:
            self._exchange(out, source, received, sent, label)
        else:
            width = math.gcd(*(part.shape[-1] for part in parts[0]))
            coded = RowBytes(self.wire, width, like.dtype, like.device)
            message = coded.encode(source.view(-1, width), self.comm.empty)
            of_all = message.new_empty(out.numel() // width, coded.nbytes)
            received, sent = ([numel // width * coded.nbytes for numel in each] for each in (received, sent))
            self._exchange(of_all.view(-1), message.view(-1), received, sent, label)
            coded.decode(of_all, out.view(-1, width))
        for view, place in _views(out, places, may_overlap=accumulate):
            if accumulate:
                place.add_(view)
            else:
                place.copy_(view)

    def _exchange(self, out: Tensor, source: Tensor, received: list[int], sent: list[int], label: str) -> None:
        if len({*sent, *received}) == 1:
            work = self.comm.all_to_all(out, source, label=label)
        else:
            work = self.comm.all_to_all(out, source, out_splits=received, source_splits=sent, label=label)
        work.drain()


def _views(buffer: Tensor, parts: list[list[Tensor]], *, may_overlap: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The parts' places in ``buffer``, one after the other, each with its part; of equal parts of a tensor all as one.

    Args:
        parts: by rank and tensor.
        may_overlap: ranks may have the same elements, which one kernel could not add up.
    """
    every = [part for some in parts for part in some]
    places = [
        place.view(part.shape)
        for place, part in zip(buffer.split([part.numel() for part in every]), every, strict=True)
    ]
    pairs: list[tuple[Tensor, Tensor]] = []
    num_tensors = len(parts[0])
    for at in range(num_tensors):
        of_buffer, of_tensor = places[at::num_tensors], every[at::num_tensors]
        place, part = _as_one(of_buffer), _as_one(of_tensor)
        if place is None or part is None or may_overlap:
            pairs += zip(of_buffer, of_tensor, strict=True)
        else:
            pairs.append((place, part))
    return pairs


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Parts of one tensor as one view of it, shape [ranks, ...]; None: they do not lie at equal distances."""
    first = parts[0]
    starts = [part.storage_offset() for part in parts]
    distance = starts[-1] - starts[-2] if len(parts) > 1 else 1
    is_regular = distance > 0 and starts == list(range(starts[0], starts[-1] + 1, distance))
    if not is_regular or len({(part.shape, part.stride()) for part in parts}) > 1:
        return None
    return first.as_strided((len(parts), *first.shape), (distance, *first.stride()), starts[0])


class _HeadExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, by: HeadExchange, heads: Sequence[tuple[range, ...]], to_heads: bool, label: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = by, heads, to_heads, f"{label} backward"
        return tuple((by.send_heads if to_heads else by.send_positions)(tensors, heads, label))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by, heads, to_heads, label = ctx.arguments
        return None, None, None, None, *(by.send_positions if to_heads else by.send_heads)(gradients, heads, label)
