"""Samples of one length out of documents of any length, decided ahead from the lengths alone.

    sequence length 8, documents of 6, 8, 3, 10 and 4 tokens: a b c d e

    concatenate   aaaaaabb  bbbbbbcc  cddddddd  dddeeee.            back to back, cut at the length
    greedy        aaaaa...  bbbbbbb.  cc......  dddddddd  deee....  in order, a new sample where the next does not fit
    first_fit     dddddddd  aaaaaeee  bbbbbbbd  cc......            longest first, each where least room would be left
    none          aaaaa...  bbbbbbb.  cc......  dddddddd  eee.....  one document a sample

A sample is a list of pieces, parts of a document. Documents longer than a sample are several pieces (``none`` keeps the
first and counts the rest). Every token but a document's first is the target of the one before it, once. The last token
of a document has no target: only ``concatenate`` gives it a position. The number of samples is known before one is
read, and each is found in O(1).

Source: best-fit decreasing over a histogram of lengths: Krell et al., "Efficient sequence packing without
cross-contamination" (arXiv:2107.02027).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.order import Indices

Packing = Literal["concatenate", "greedy", "first_fit", "none"]


class DocumentPiece(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class PackedIndex:
    """The pieces of every sample, one after the other.

    Memory: 24 bytes a piece and 8 a sample, on the host.
    """

    sequence_length: int
    first: Indices  # [samples + 1]: each sample's first piece
    document: Indices  # [pieces]
    start: Indices  # [pieces]
    stop: Indices  # [pieces]
    num_left_out: int = 0  # tokens that are no sample's targets

    def __len__(self) -> int:
        return len(self.first) - 1

    def pieces(self, sample: int) -> list[DocumentPiece]:
        """Of one sample, in the order in which it has them."""
        part = slice(int(self.first[sample]), int(self.first[sample + 1]))
        columns = (self.document[part], self.start[part], self.stop[part])
        return [DocumentPiece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def pairs(self, samples: Indices) -> npt.NDArray[np.float64]:
        """Pairs of positions of one document in each sample, which attention computes: the sum of squared lengths.

        Padding counts as a document.
        """
        counts = self.first[samples + 1] - self.first[samples]
        begins = np.cumsum(counts) - counts
        pieces = np.repeat(self.first[samples] - begins, counts) + np.arange(int(counts.sum()))
        lengths = (self.stop[pieces] - self.start[pieces]).astype(np.float64)
        padding = self.sequence_length - np.add.reduceat(lengths, begins)
        result: npt.NDArray[np.float64] = np.add.reduceat(lengths**2, begins) + padding**2
        return result


def pack(lengths: Indices, sequence_length: int, packing: Packing, order: Indices) -> PackedIndex:
    """Pack documents.

    >>> index = pack(np.array([6, 8, 3, 10, 4]), 8, "first_fit", np.arange(5))
    >>> [[tuple(piece) for piece in index.pieces(sample)] for sample in range(len(index))]
    [[(3, 0, 8)], [(0, 0, 5), (4, 0, 3)], [(1, 0, 7), (3, 8, 9)], [(2, 0, 2)]]

    Args:
        lengths: tokens of each document, [documents].
        sequence_length: 2 or more, so that each sample has a target.
        order: of the documents, [documents].
    """
    order = order[lengths[order] > 1]
    sizes = lengths[order]
    if packing == "concatenate":
        document, start, stop, sample = _cut(order, sizes, np.cumsum(sizes) - sizes, sequence_length)
        num_samples = -(-max(int(sizes.sum()) - 1, 0) // sequence_length)  # none of the last token alone
        first = np.searchsorted(sample, np.arange(num_samples + 1))
        return PackedIndex(sequence_length, first, document, start, stop)
    sizes = sizes - 1
    if packing == "none":
        start, stop = np.zeros_like(sizes), np.minimum(sizes, sequence_length)
        first = np.arange(len(order) + 1)
        return PackedIndex(sequence_length, first, order, start, stop, int((sizes - stop).sum()))
    document, start, stop, _ = _cut(order, sizes, np.zeros_like(sizes), sequence_length)
    if packing == "greedy":
        return PackedIndex(sequence_length, _next_fit(stop - start, sequence_length), document, start, stop)
    pieces, first = _best_fit(stop - start, sequence_length)
    return PackedIndex(sequence_length, first, document[pieces], start[pieces], stop[pieces])


def _cut(order: Indices, sizes: Indices, begins: Indices, room: int) -> tuple[Indices, Indices, Indices, Indices]:
    """Documents that begin at these places of a line, cut at each multiple of ``room``.

    Returns: of each piece its document, where it starts and stops there, and the multiple before it.
    """
    counts = (begins + sizes - 1) // room - begins // room + 1
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    multiple = np.repeat(begins // room, counts) + number
    at = multiple * room - np.repeat(begins, counts)
    return np.repeat(order, counts), np.maximum(at, 0), np.minimum(at + room, np.repeat(sizes, counts)), multiple


def _next_fit(sizes: Indices, room: int) -> Indices:
    """The first piece of each sample, and the number of pieces."""
    ends = np.cumsum(sizes)
    following = np.searchsorted(ends, ends - sizes + room, side="right").tolist()  # where a sample from here ends
    first = [0]
    while first[-1] < len(following):
        first.append(following[first[-1]])
    return np.array(first, dtype=np.int64)


def _best_fit(sizes: Indices, room: int) -> tuple[Indices, Indices]:
    """The pieces in the order of samples, and each sample's first.

    Samples that have pieces of the same sizes are one kind, so that the work is by sizes and not by documents.
    """
    by_size = np.argsort(sizes, kind="stable")
    counts = np.bincount(sizes, minlength=room + 1)
    next_of_size = np.cumsum(counts) - counts  # the next piece of a size, in ``by_size``
    kinds: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # by room that is left: (samples, sizes)
    rooms: list[int] = []  # the keys of ``kinds``, sorted

    def add(left: int, num: int, pieces: tuple[int, ...]) -> None:
        if num and left not in kinds:
            insort(rooms, left)
        if num:
            kinds.setdefault(left, []).append((num, pieces))

    for size in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[size])
        while count:
            place = bisect_left(rooms, size)
            if place == len(rooms):  # no sample has room: new ones, as full as this size makes them
                each = min(room // size, count)
                add(room - each * size, count // each, (size,) * each)
                count %= each
                continue
            left = rooms[place]
            num, pieces = kinds[left].pop()
            if not kinds[left]:
                del kinds[left], rooms[place]
            each = min(left // size, -(-count // num))  # of this size into each of them
            filled = min(num, count // each)
            add(left - each * size, filled, (*pieces, *(size,) * each))
            add(left, num - filled, pieces)
            count -= filled * each
    order: list[Indices] = []
    pieces_in: list[Indices] = []
    for num, pieces in (kind for left in rooms for kind in kinds[left]):
        columns = []
        for size in pieces:
            columns.append(by_size[next_of_size[size] : next_of_size[size] + num])
            next_of_size[size] += num
        order.append(np.stack(columns, axis=1).reshape(-1))
        pieces_in.append(np.full(num, len(pieces)))
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *order]), np.cumsum(np.concatenate([np.zeros(1, np.int64), *pieces_in]))


def balance(work: Sequence[float] | npt.NDArray[np.float64], num_ranks: int, num_micro: int) -> Indices:
    """Divide samples over ranks and micro-batches, as many to each, so that all have alike work.

    >>> balance([9, 1, 4, 6], num_ranks=2, num_micro=2).tolist()
    [[[0], [1]], [[3], [2]]]

    Samples are sorted by work, and cut into tiers of one for each rank, so that the samples of a tier are alike. Each
    tier is in the same micro-batch on all ranks; its largest sample goes to the rank with the least work so far. Then
    the ranks with the most and the least work exchange samples of a tier as long as that brings them closer.

    Args:
        work: of each sample, [samples]; a multiple of ranks x micro-batches.

    Returns: the numbers of the samples, [ranks, micro-batches, samples of a micro-batch], ascending in the last.
    """
    if num_ranks == num_micro == 1:
        return np.arange(len(work)).reshape(1, 1, -1)
    work = np.asarray(work, dtype=np.float64)
    tiers = np.argsort(-work, kind="stable").reshape(-1, num_ranks)
    totals = np.zeros(num_ranks)
    for tier in tiers:
        tier[np.argsort(totals, kind="stable")] = tier.copy()
        totals += work[tier]
    for _ in range(8 * len(work)):
        high, low = int(totals.argmax()), int(totals.argmin())
        gains = work[tiers[:, high]] - work[tiers[:, low]]
        gap = totals[high] - totals[low]
        best = int(np.abs(gains - gap / 2).argmin()) if len(gains) else 0
        if not len(gains) or not 0 < gains[best] < gap:
            break
        tiers[best, [high, low]] = tiers[best, [low, high]]
        totals[[high, low]] += [-gains[best], gains[best]]
    micros: list[list[int]] = [[] for _ in range(num_micro)]
    sums = [0.0] * num_micro
    size = len(tiers) // num_micro
    for number, tier in enumerate(tiers):  # the longest tiers first, into the micro-batch with the least work
        micro = min(
            (each for each in range(num_micro) if len(micros[each]) < size), key=lambda each: (sums[each], each)
        )
        micros[micro].append(number)
        sums[micro] += float(work[tier].mean())
    return np.sort(np.stack([tiers[numbers].T for numbers in micros], axis=1), axis=2)
