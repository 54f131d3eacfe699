"""Which positions of a sequence each rank holds, the documents in its rows, and which tiles of scores a rank computes.

Under a causal mask the last positions attend to all others and the first to none, so that equal contiguous parts give
the last rank most of the work. ``balanced`` cuts the sequence into two chunks for each rank, one from each end:

    4 ranks    chunk     0  1  2  3  4  5  6  7
               rank      0  1  2  3  3  2  1  0

    >>> [[list(chunk) for chunk in rank] for rank in chunks_of(8, 2, "balanced")]
    [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    >>> chunks_of(7, 2, "contiguous")
    ((range(0, 4),), (range(4, 7),))

Packed documents make another amount of work of each chunk. Where the documents are known (``Documents.balanced``) the
chunks are cut so that ranks have equal work all the same, and as many positions: the sequence is a circle, each rank in
turn takes the part of its length whose work is nearest to the mean of what is left, and the circle closes behind it. So
N ranks have 2 N - 1 chunks at most.

    3 documents    keys     1  2  3  4    1  2    1  2    that a position attends to: 8 for each of
    2 ranks        rank     1  1  1  0    0  0    0  1

    >>> chunks_of(8, 2, "balanced", ((0, 4, 6, 8),))
    ((range(3, 7),), (range(0, 3), range(7, 8)))

A tile is a rectangle of scores that a kernel computes without a mask, or a square with a causal one:

    >>> first, second = chunks_of(8, 2, "balanced")
    >>> print(*tiles_of(first, first, True, None))  # its own keys: causal, as its chunks are in the sequence's order
    [q 0:4, k 0:4, causal]
    >>> print(*tiles_of(first, second, True, None))  # of the other rank's keys only the tail's queries need some: all
    [q 2:4, k 0:4]
    >>> print(*tiles_of(second, first, True, None))
    [q 0:4, k 0:2]

Documents cut tiles: position 5 begins a document here.

    >>> print(*tiles_of(first, second, True, ((0, 5, 8),)))
    [q 2:4, k 3:4]

A sliding window makes a band of scores. Along its upper edge lie causal squares (c), along its lower edge squares that
are causal when queries and keys are both read backward (r). Squares of one size are one tile, and no score outside the
band is computed. A window of 3, a position and 2 before it, for 7 positions:

    k    0 1 2 3 4 5 6
    q 0  c                  >>> (whole,) = chunks_of(7, 1, "contiguous")
      1  c c                >>> print(*tiles_of(whole, whole, True, None, 3), sep=" ")
      2  r r c              [q 0:2, k 0:2, causal] [q 2:6, k 2:6, causal, 2 blocks]
      3    r c c            [q 2:6, k 0:4, reversed, 2 blocks] [q 6:7, k 6:7, causal]
      4      r r c          [q 6:7, k 4:5, reversed] [q 6:7, k 5:6]
      5        r c c
      6          r . c

Source: head-tail chunks: Llama 3 (arXiv:2407.21783), section 3.3.2; zig-zag ring attention. Parts equal in two measures
by few cuts: Alon, "Splitting necklaces", Advances in Mathematics 63 (1987).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.device import is_fake, on_host
from shoal.errors import UsageError

ChunkOrder = Literal["balanced", "contiguous"]
Chunks = tuple[range, ...]  # the positions of one rank, in the order in which it holds them


class Tile(NamedTuple):
    """Queries ``q0`` to ``q1`` against keys ``k0`` to ``k1``, counted in what the two ranks hold.

    Args:
        row: of the batch; None: all rows.
        is_causal: a query attends to the keys up to its own place.
        is_reversed: of a causal tile: both are read backward, so that a query attends to the keys from its place on.
        num_blocks: equal parts of the queries and of the keys; part i of the queries attends to part i of the keys.
    """

    row: int | None
    q0: int
    q1: int
    k0: int
    k1: int
    is_causal: bool = False
    is_reversed: bool = False
    num_blocks: int = 1

    def __str__(self) -> str:
        words = [f"q {self.q0}:{self.q1}", f"k {self.k0}:{self.k1}"]
        words += ["reversed" if self.is_reversed else "causal"] * self.is_causal
        words += [f"{self.num_blocks} blocks"] * (self.num_blocks > 1) + [f"row {self.row}"] * (self.row is not None)
        return f"[{', '.join(words)}]"


@dataclass(frozen=True)
class Documents:
    """Where the documents of each row of the batch begin, and the length of the row.

    All ranks have the same. Make one for a batch and give it to every layer: then no layer communicates for it. What is
    made from lengths, or from tensors in host memory, waits for no device; what is made from a tensor of a device waits
    once.

    >>> Documents.of_lengths([[3, 5], [8]]).begins
    ((0, 3, 8), (0, 8))
    >>> Documents.from_ids(torch.tensor([[7, 7, 2, 2, 2], [1, 1, 1, 1, 1]])).begins
    ((0, 2, 5), (0, 5))
    >>> Documents.from_positions(torch.tensor([[0, 1, 2, 0, 1]])).begins
    ((0, 3, 5),)

    Args:
        chunked_by: where the documents begin by which ranks of ``cp`` have divided the rows; None: they did so without
            regard to documents.

    Raises: UsageError: the rows do not have one length.
    """

    begins: tuple[tuple[int, ...], ...]
    chunked_by: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        lengths = {row[-1] for row in self.begins}
        if len(lengths) != 1:
            raise UsageError(
                f"the documents of the rows of a batch have {sorted(lengths)} positions together",
                do="give every row documents of the same number of positions; padding is a document too.",
                code="sequence-documents",
            )

    @property
    def length(self) -> int:
        return self.begins[0][-1]

    @property
    def are_whole_rows(self) -> bool:
        """True if each row is one document."""
        return all(len(row) == 2 for row in self.begins)

    def balanced(self) -> Documents:
        """The same documents, for rows that ranks of ``cp`` divide by the documents, so that all have equal work.

        Give them to ``SequenceContext.shard`` with each tensor of the batch, and to attention.
        """
        return self if self.are_whole_rows else replace(self, chunked_by=self.begins)

    @classmethod
    def of_lengths(cls, lengths: Sequence[Sequence[int]]) -> Documents:
        """Documents of these lengths, one list for each row of the batch."""
        sums = (accumulate(row, initial=0) for row in lengths)
        return cls(tuple(tuple(dict.fromkeys(row)) for row in sums))  # without documents of no length

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Documents:
        """Cumulative lengths, [number of documents + 1], as variable-length kernels take them: a batch of one row."""
        return cls((tuple(dict.fromkeys(cu_seqlens.tolist())),))

    @classmethod
    def from_ids(cls, ids: Tensor) -> Documents:
        """A number for each position, [B, L] or [L]: a document is a run of equal ones."""
        ids = torch.atleast_2d(ids)
        return cls._from_first(ids[:, 1:] != ids[:, :-1])

    @classmethod
    def from_positions(cls, positions: Tensor) -> Documents:
        """``position_ids``, [B, L] or [L]: where one is not the next of the one before, a document begins."""
        positions = torch.atleast_2d(positions)
        return cls._from_first(positions[:, 1:] != positions[:, :-1] + 1)

    @classmethod
    def of_padding(cls, is_token: Tensor) -> Documents:
        """Rows with padding before or after the tokens, [B, L]: a document of tokens, and documents of padding.

        Raises: UsageError: padding between tokens.
        """
        is_token = on_host(is_token)
        documents = cls.from_ids(is_token)
        values = is_token.to(torch.int8)
        if bool(((values[:, 1:] - values[:, :-1] == 1).sum(1) + values[:, 0] > 1).any()):
            raise UsageError(
                "a row of attention_mask has padding between tokens",
                do="put padding before or after the tokens, and separate packed documents by position_ids.",
                code="sequence-documents",
            )
        return documents

    @classmethod
    def _from_first(cls, is_first: Tensor) -> Documents:
        """Args: is_first: [B, L - 1]: True if a document begins at this position, from the second on."""
        length = is_first.shape[1] + 1
        rows: list[list[int]] = [[0] for _ in range(is_first.shape[0])]
        found = on_host(is_first)
        for row, position in () if is_fake(found) else found.nonzero().tolist():  # a dry run: each row is one document
            rows[row].append(position + 1)
        return cls(tuple((*row, length) for row in rows))

    def and_of(self, other: Documents) -> Documents:
        """Documents that begin where one of either begins: positions attend where both allow it."""
        rows = max(len(self.begins), len(other.begins))
        pairs = zip(self._of_rows(rows), other._of_rows(rows), strict=True)
        begins = tuple(tuple(sorted({*mine, *theirs})) for mine, theirs in pairs)
        return Documents(begins, self.chunked_by or other.chunked_by)

    def _of_rows(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return self.begins * rows if len(self.begins) == 1 else self.begins


class DocumentRun(NamedTuple):
    """Positions of one document that follow each other in a rank's memory."""

    document: int
    start: int
    stop: int
    shift: int  # place in memory - position


class Band(NamedTuple):
    """The keys around a position that it attends to: so many before it, and so many after it."""

    before: int
    after: int


def cuts(length: int, parts: int) -> list[int]:
    """Where each of ``parts`` nearly equal parts of ``length`` elements begins, and the end; longer ones come first.

    >>> cuts(7, 3)
    [0, 3, 5, 7]
    """
    each, more = divmod(length, parts)
    return [index * each + min(index, more) for index in range(parts + 1)]


@lru_cache(maxsize=256)
def chunks_of(
    length: int, ranks: int, order: ChunkOrder, documents: tuple[tuple[int, ...], ...] | None = None
) -> tuple[Chunks, ...]:
    """Each rank's chunks of a sequence of ``length`` positions. How many they have does not depend on ``documents``.

    Args:
        documents: where those of each row begin, and the length, to balance the work of causal attention within them.
    """
    if order == "contiguous" or ranks == 1:
        return tuple((range(start, stop),) for start, stop in pairwise(cuts(length, ranks)))
    every = [range(start, stop) for start, stop in pairwise(cuts(length, 2 * ranks))]
    chunks = tuple((every[rank], every[2 * ranks - 1 - rank]) for rank in range(ranks))
    if documents is None or length < 2 * ranks:
        return chunks
    return _of_equal_work(documents, [num_positions(each) for each in chunks])


def _of_equal_work(documents: tuple[tuple[int, ...], ...], sizes: list[int]) -> tuple[Chunks, ...]:
    """Chunks for ranks that hold so many positions: see the module."""
    length = sum(sizes)
    block = math.gcd(*sizes, 1 << max(length.bit_length() - 17, 0))  # cuts are at its multiples: 65,536 or more
    bounds = np.arange(0, length + 1, block)
    scores = np.zeros(len(bounds))  # of the positions before each bound
    for row in documents:
        begins, lengths = np.array(row), np.diff(row).astype(np.float64)
        before = np.concatenate([[0.0], np.cumsum(lengths * (lengths + 1) / 2)])
        document = np.searchsorted(begins, bounds, side="right") - 1
        inside = (bounds - begins[document]).astype(np.float64)
        scores += before[document] + inside * (inside + 1) / 2
    work, left = np.diff(scores), np.arange(length // block)
    ranks: list[Chunks] = []
    for size in (each // block for each in sizes):
        there = work[left]
        sums = np.concatenate([[0.0], np.cumsum(np.concatenate([there, there[:size]]))])
        of_windows = sums[size : size + len(left)] - sums[: len(left)]
        first = int(np.abs(of_windows - there.sum() * size / len(left)).argmin())
        window = np.sort((first + np.arange(size)) % len(left))
        taken, left = left[window], np.delete(left, window)
        runs = np.split(taken, np.flatnonzero(np.diff(taken) > 1) + 1)
        ranks.append(tuple(range(int(run[0]) * block, (int(run[-1]) + 1) * block) for run in runs))
    return tuple(ranks)


def num_positions(chunks: Chunks) -> int:
    return sum(len(chunk) for chunk in chunks)


@lru_cache(maxsize=1024)
def tiles_of(
    queries: Chunks,
    keys: Chunks,
    is_causal: bool,
    documents: tuple[tuple[int, ...], ...] | None,
    window: int | None = None,
) -> tuple[Tile, ...]:
    """The tiles that queries of one rank need of the keys of one rank; of the same rank, or of another.

    Args:
        documents: of each row of the batch, where its documents begin, and the length; None: one document a row.
        window: a position attends to itself and ``window - 1`` positions before it, and after it unless ``is_causal``.
    """
    band = None if window is None else Band(window - 1, 0 if is_causal else window - 1)
    if documents is None or len(set(documents)) == 1:
        return tuple(_tiles_of_row(None, queries, keys, is_causal, documents[0] if documents else None, band))
    return tuple(
        tile
        for row, begins in enumerate(documents)
        for tile in _tiles_of_row(row, queries, keys, is_causal, begins, band)
    )  # fmt: skip


@lru_cache(maxsize=1024)
def keys_of(tiles: tuple[Tile, ...]) -> tuple[range, ...]:
    """The keys that tiles need, in order.

    >>> keys_of((Tile(0, 0, 1, 4, 6), Tile(0, 1, 2, 5, 8), Tile(1, 0, 2, 1, 2)))
    (range(1, 2), range(4, 8))
    """
    keys: list[range] = []
    for start, stop in sorted((tile.k0, tile.k1) for tile in tiles):
        if keys and start <= keys[-1].stop:
            keys[-1] = range(keys[-1].start, max(stop, keys[-1].stop))
        else:
            keys.append(range(start, stop))
    return tuple(keys)


@lru_cache(maxsize=1024)
def of_packed_keys(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The same tiles of ``keys_of(tiles)``, one after the other.

    >>> print(*of_packed_keys((Tile(0, 0, 1, 4, 6), Tile(1, 0, 2, 1, 2))))
    [q 0:1, k 1:3, row 0] [q 0:2, k 0:1, row 1]
    """
    starts = [keys.start for keys in keys_of(tiles)]
    lengths = accumulate((len(keys) for keys in keys_of(tiles)), initial=0)
    shifts = [length - start for start, length in zip(starts, lengths, strict=False)]
    moved = []
    for tile in tiles:
        shift = shifts[bisect_right(starts, tile.k0) - 1]
        moved.append(tile._replace(k0=tile.k0 + shift, k1=tile.k1 + shift))
    return tuple(moved)


def _tiles_of_row(
    row: int | None, queries: Chunks, keys: Chunks, is_causal: bool, begins: tuple[int, ...] | None, band: Band | None
) -> list[Tile]:
    runs = _runs(queries, begins)
    if is_causal and queries == keys and band is None:
        # A rank's chunks are in the order of the sequence: a document's positions there, one after the other, are
        # causal among themselves.
        return [Tile(row, run.start, run.stop, run.start, run.stop, True) for run in _joined(runs)]
    key_runs = _runs(keys, begins)
    tiles = []
    for query_chunk, query_runs in zip(queries, runs, strict=True):
        for key_chunk, runs_there in zip(keys, key_runs, strict=True):
            if is_causal and query_chunk.start < key_chunk.start:
                continue
            there = {run.document: run for run in runs_there}
            for run in query_runs:
                other = there.get(run.document)
                if other is None:
                    continue
                if band is None:
                    tiles.append(Tile(row, run.start, run.stop, other.start, other.stop))
                else:
                    tiles += _tiles_of_band(row, run, other, band)
    return _merged(tiles) if band is None else tiles


def _tiles_of_band(row: int | None, queries: DocumentRun, keys: DocumentRun, band: Band) -> list[Tile]:
    """The tiles of queries that attend, at place i, to the keys at places i + low to i + high, where there are such."""
    low, high = (keys.shift - queries.shift + distance for distance in (-band.before, band.after))
    first, end = max(queries.start, keys.start - high), min(queries.stop, keys.stop - low)
    if first >= end:
        return []
    if low == high:
        return [Tile(row, first, end, first + low, end + low, num_blocks=end - first)]
    # The band's lower edge is inside the keys from low_from on, its upper edge up to high_to.
    low_from, high_to = (min(max(edge, first), end) for edge in (keys.start - low, keys.stop - high))
    tiles: list[Tile] = []
    for start, stop in pairwise(sorted({first, low_from, high_to, end})):
        has_low, has_high = start >= low_from, stop <= high_to
        num_blocks = (stop - start) // (high - low) if has_low and has_high else 0
        rest = start + num_blocks * (high - low)
        for q0, q1, blocks in ((start, rest, num_blocks), (rest, stop, 1)):
            if q0 == q1:
                continue
            if has_high:
                tiles.append(Tile(row, q0, q1, q0 + high, q1 + high, True, num_blocks=blocks))
            if has_low:
                tiles.append(Tile(row, q0, q1, q0 + low, q1 + low, True, True, blocks))
            k0, k1 = q1 + low if has_low else keys.start, q0 + high if has_high else keys.stop
            if k0 < k1:
                tiles.append(Tile(row, q0, q1, k0, k1))
    return tiles


def _runs(chunks: Chunks, begins: tuple[int, ...] | None) -> list[list[DocumentRun]]:
    """The runs of each chunk."""
    by_chunk = []
    offset = 0
    for chunk in chunks:
        shift = offset - chunk.start
        bounds = (0, chunk.stop) if begins is None else begins
        first, end = bisect_right(bounds, chunk.start) - 1, bisect_left(bounds, chunk.stop)
        inside = [chunk.start, *bounds[first + 1 : end], chunk.stop] if chunk else []
        by_chunk.append([
            DocumentRun(first + index, start + shift, stop + shift, shift)
            for index, (start, stop) in enumerate(pairwise(inside))
        ])  # fmt: skip
        offset += len(chunk)
    return by_chunk


@lru_cache(maxsize=256)
def most_exchanged(chunks: tuple[Chunks, ...], documents: tuple[tuple[int, ...], ...], is_causal: bool) -> int:
    """How many positions any rank receives and sends, at most: with a window or several rows it may be fewer."""
    most = [0] * len(chunks)
    for begins in set(documents):
        by_rank = [[run for runs in _runs(each, begins) for run in runs] for each in chunks]
        readers = Counter(document for runs in by_rank for document in {run.document for run in runs})
        for rank, runs in enumerate(by_rank):
            ends = {run.document: run.stop - run.shift if is_causal else begins[run.document + 1] for run in runs}
            most[rank] += sum(end - begins[document] for document, end in ends.items())  # its own positions included
            most[rank] += sum((run.stop - run.start) * (readers[run.document] - 2) for run in runs)  # less its own
    return max(most)


def _joined(runs: Sequence[Sequence[DocumentRun]]) -> list[DocumentRun]:
    """The runs of all chunks, a document's in one."""
    joined: list[DocumentRun] = []
    for run in (run for of_chunk in runs for run in of_chunk):
        if joined and joined[-1].document == run.document:
            joined[-1] = joined[-1]._replace(stop=run.stop)
        else:
            joined.append(run)
    return joined


def _merged(tiles: list[Tile]) -> list[Tile]:
    """The same scores in fewer tiles: neighbours with the same keys, then neighbours with the same queries."""
    for _ in range(2):
        merged: list[Tile] = []
        for tile in sorted(tiles, key=lambda tile: (tile.k0, tile.k1, tile.q0)):
            last = merged[-1] if merged else None
            if last and (last.k0, last.k1, last.q1) == (tile.k0, tile.k1, tile.q0):
                merged[-1] = last._replace(q1=tile.q1)
            else:
                merged.append(tile)
        # Queries and keys change places, so that the second pass merges along the keys and returns them to theirs.
        tiles = [tile._replace(q0=tile.k0, q1=tile.k1, k0=tile.q0, k1=tile.q1) for tile in merged]
    return tiles
