"""Which positions of a sequence each rank holds, and which tiles of the score matrix it computes.

Under a causal mask the last positions attend to all others and the first to none, so that equal contiguous parts give
the last rank most of the work. ``balanced`` cuts the sequence into two chunks for each rank, one from each end:

    4 ranks    chunk     0  1  2  3  4  5  6  7
               rank      0  1  2  3  3  2  1  0

    >>> [[list(chunk) for chunk in rank] for rank in chunks_of(8, 2, "balanced")]
    [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    >>> chunks_of(7, 2, "contiguous")
    ((range(0, 4),), (range(4, 7),))

A tile is a rectangle of scores that a kernel computes without a mask, or a square with a causal one:

    >>> first, second = chunks_of(8, 2, "balanced")
    >>> tiles_of(first, first, True, None)  # its own keys: causal, since its chunks are in the order of the sequence
    (Tile(row=None, q0=0, q1=4, k0=0, k1=4, is_causal=True),)
    >>> tiles_of(first, second, True, None)  # of the other rank's keys only the tail's queries need some, all of them
    (Tile(row=None, q0=2, q1=4, k0=0, k1=4, is_causal=False),)
    >>> tiles_of(second, first, True, None)
    (Tile(row=None, q0=0, q1=4, k0=0, k1=2, is_causal=False),)

Documents cut tiles: position 5 begins a document here.

    >>> tiles_of(first, second, True, ((0, 5, 8),))
    (Tile(row=None, q0=2, q1=4, k0=3, k1=4, is_causal=False),)

Source: head-tail chunks: Llama 3 (arXiv:2407.21783), section 3.3.2; zig-zag ring attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

ChunkOrder = Literal["balanced", "contiguous"]
Chunks = tuple[range, ...]  # the positions of one rank, in the order in which it holds them


class Tile(NamedTuple):
    """Queries ``q0`` to ``q1`` against keys ``k0`` to ``k1``, counted in what the two ranks hold."""

    row: int | None  # of the batch; None: all rows
    q0: int
    q1: int
    k0: int
    k1: int
    is_causal: bool


class DocumentRun(NamedTuple):
    """Positions of one document that follow each other in a rank's memory."""

    document: int
    start: int
    stop: int


def cuts(length: int, parts: int) -> list[int]:
    """The ends of ``parts`` nearly equal parts of ``length`` positions; the first parts are the longer ones.

    >>> cuts(7, 3)
    [0, 3, 5, 7]
    """
    each, more = divmod(length, parts)
    return [index * each + min(index, more) for index in range(parts + 1)]


@lru_cache(maxsize=256)
def chunks_of(length: int, ranks: int, order: ChunkOrder) -> tuple[Chunks, ...]:
    """Each rank's chunks of a sequence of ``length`` positions."""
    if order == "contiguous" or ranks == 1:
        return tuple((range(start, stop),) for start, stop in pairwise(cuts(length, ranks)))
    every = [range(start, stop) for start, stop in pairwise(cuts(length, 2 * ranks))]
    return tuple((every[rank], every[2 * ranks - 1 - rank]) for rank in range(ranks))


def num_positions(chunks: Chunks) -> int:
    return sum(len(chunk) for chunk in chunks)


@lru_cache(maxsize=1024)
def tiles_of(
    queries: Chunks, keys: Chunks, is_causal: bool, documents: tuple[tuple[int, ...], ...] | None
) -> tuple[Tile, ...]:
    """The tiles that queries of one rank need of the keys of one rank; of the same rank, or of another.

    Args:
        documents: of each row of the batch, where its documents begin, and the length; None: one document a row.
    """
    if documents is None or len(set(documents)) == 1:
        return tuple(_tiles_of_row(None, queries, keys, is_causal, documents[0] if documents else None))
    return tuple(
        tile
        for row, begins in enumerate(documents)
        for tile in _tiles_of_row(row, queries, keys, is_causal, begins)
    )  # fmt: skip


def _tiles_of_row(
    row: int | None, queries: Chunks, keys: Chunks, is_causal: bool, begins: tuple[int, ...] | None
) -> list[Tile]:
    runs = _runs(queries, begins)
    if is_causal and queries == keys:
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
                if other is not None:
                    tiles.append(Tile(row, run.start, run.stop, other.start, other.stop, False))
    return _merged(tiles)


def _runs(chunks: Chunks, begins: tuple[int, ...] | None) -> list[list[DocumentRun]]:
    """The runs of each chunk."""
    found = []
    offset = 0
    for chunk in chunks:
        shift = offset - chunk.start
        bounds = enumerate(pairwise((0, chunk.stop) if begins is None else begins))
        inside = ((document, max(start, chunk.start), min(stop, chunk.stop)) for document, (start, stop) in bounds)
        found.append(
            [DocumentRun(document, start + shift, stop + shift) for document, start, stop in inside if start < stop]
        )
        offset += len(chunk)
    return found


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
    by_keys: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: (tile.k0, tile.k1, tile.q0)):
        last = by_keys[-1] if by_keys else None
        if last and (last.k0, last.k1, last.q1) == (tile.k0, tile.k1, tile.q0):
            by_keys[-1] = last._replace(q1=tile.q1)
        else:
            by_keys.append(tile)
    by_queries: list[Tile] = []
    for tile in sorted(by_keys, key=lambda tile: (tile.q0, tile.q1, tile.k0)):
        last = by_queries[-1] if by_queries else None
        if last and (last.q0, last.q1, last.k1) == (tile.q0, tile.q1, tile.k0):
            by_queries[-1] = last._replace(k1=tile.k1)
        else:
            by_queries.append(tile)
    return by_queries
