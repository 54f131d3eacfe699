"""Sums an embedding's gradient, which is zero but in a few rows, over the ranks by sending those rows alone.

    rank 0   rows 1, 4      exchange   how many rows each rank has: 2, 1
    rank 1   row  4         all_gather their numbers, padded to the most any rank has: 1 4 | 4 -
                            all_gather their values, likewise
                            row 1 = scale * rank 0's,  row 4 = scale * (rank 0's + rank 1's)

The sum of each row is taken in rank order in fp32, scaled and rounded once, as ``comm`` does it: the same bits as the
dense collective. Where that sends fewer bytes (rows that nearly all ranks have, a table that is used densely too) it is
taken instead; every rank decides alike, from the counts.
"""

from __future__ import annotations

import torch

from shoal.comm.protocol import Communicator, FinishedWork, Work
from shoal.comm.wire import Wire
from shoal.device import is_fake

INDEX_NBYTES = 8


def coalesced(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sparse gradient with one entry a row, entries of a row added up in ``dtype`` (fp32 at least), as ``dtype``."""
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.to(torch.float32)
    return wide.coalesce().to(dtype)


class SparseSum:
    """``all_reduce`` and ``reduce_scatter`` of a flat embedding gradient along one axis, as ``Communicator`` has them.

    Both block until every rank has come. In a dry run, which knows no values, they are the dense ones.

    Args:
        num_rows: of the table, which lies at the beginning of what is summed; the rest is padding of zeros.
        width: elements of a row.
    """

    def __init__(self, comm: Communicator, num_rows: int, width: int) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._num_rows = num_rows
        self._width = width

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: Wire | None = None
    ) -> Work:
        """As ``Communicator.all_gather``."""
        return self._comm.all_gather(full, shard, label=label, wire=wire)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str, wire: Wire | None = None) -> Work:
        """As ``Communicator.all_reduce``.

        Communicates: 8 bytes per rank; then, n the most rows that any rank has, two all_gathers: n indices of 8 bytes,
        and n rows.
        """
        summed = None if is_fake(full) else self._sum(full, scale, num_passes=2, label=label)
        if summed is None:
            return self._comm.all_reduce(full, scale=scale, label=label, wire=wire)
        rows, total = summed
        with torch.no_grad():
            self._table(full)[rows] = total.to(full.dtype)
        return FinishedWork(full)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: Wire | None = None,
    ) -> Work:
        """As ``Communicator.reduce_scatter``. Communicates: as ``all_reduce``."""
        summed = None if is_fake(full) else self._sum(full, scale, num_passes=1, label=label)
        if summed is None:
            return self._comm.reduce_scatter(full, out, scale=scale, accumulate=accumulate, label=label, wire=wire)
        with torch.no_grad():
            if not accumulate:
                out.zero_()
            add_rows(out, self.rank * out.numel(), self._width, *summed)
        return FinishedWork(out)

    def _table(self, full: torch.Tensor) -> torch.Tensor:
        return full[: self._num_rows * self._width].view(self._num_rows, self._width)

    @torch.no_grad()
    def _sum(
        self, full: torch.Tensor, scale: float, *, num_passes: int, label: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows that any rank has, ascending, and their scaled sums in fp32; None: the dense collective is cheaper.

        Args:
            num_passes: how often the dense collective moves the table.
        """
        table = self._table(full)
        mine = rows_in(table)
        counts = exchange_counts(self._comm, len(mine), full.device, label=label)
        most = max(counts)
        row_nbytes = self._width * full.element_size()
        if self.size * most * (row_nbytes + INDEX_NBYTES) >= num_passes * self._num_rows * row_nbytes:
            return None
        return sum_rows(self._comm, mine, table[mine], counts, scale, label=label)


def rows_in(table: torch.Tensor) -> torch.Tensor:
    """Which rows are not zero, ascending; NaN is not. Shape: [n].

    The largest and the smallest element of a row tell, in a sixth of the time that comparing each takes on a CPU; bits
    of 16-bit numbers are compared as integers, which takes a fifth again (-0 counts as not zero, and adds nothing).
    """
    if not table.numel():
        return torch.zeros(0, dtype=torch.int64, device=table.device)
    numbers = table.view(torch.int16) if table.dtype.itemsize == 2 else table
    return ((numbers.amax(dim=1) != 0) | (numbers.amin(dim=1) != 0)).nonzero().flatten()


def exchange_counts(comm: Communicator, count: int, device: torch.device, *, label: str) -> list[int]:
    """Every rank's number of rows. Communicates: one exchange of 8 bytes. Order: blocks the host."""
    mine = torch.tensor([count], dtype=torch.int64, device=device)
    if comm.size == 1:
        return [count]
    counts = comm.read(comm.exchange(mine, label=label).wait(), when_fake=0.0)
    return [int(count) for count in counts]


def sum_rows(
    comm: Communicator,
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: list[int],
    scale: float,
    *,
    label: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that any rank has, ascending, and their scaled sums over the ranks.

    Args:
        indices: this rank's rows, each once. Shape: [count].
        values: shape [count, width].
        counts: of every rank.

    Returns: indices of shape [n] and sums of shape [n, width] in fp32 (fp64 of fp64).
    Communicates: two all_gathers of ``max(counts)`` indices and rows per rank; none where no rank has a row.
    """
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    most, width = max(counts), values.shape[1]
    if most == 0:
        return indices, values.to(wide)
    all_indices = gather_padded(comm, indices, most, label=label).view(comm.size, most)
    all_values = gather_padded(comm, values.reshape(-1), most * width, label=label).view(comm.size, most, width)
    parts = [all_indices[rank, :count] for rank, count in enumerate(counts)]
    rows, places = torch.unique(torch.cat(parts), return_inverse=True)
    total = torch.zeros(len(rows), width, dtype=wide, device=values.device)
    for rank, place in enumerate(places.split(counts)):
        total[place] += all_values[rank, : len(place)].to(wide)  # a rank has each row once
    return rows, total if scale == 1.0 else total.mul_(scale)


def gather_padded(comm: Communicator, mine: torch.Tensor, numel: int, *, label: str) -> torch.Tensor:
    """Every rank's 1-D tensor, padded to ``numel``, one after the other. Order: blocks until every rank has come."""
    full = comm.empty(comm.size * numel, mine.dtype, mine.device)
    part = full[comm.rank * numel : (comm.rank + 1) * numel]
    part[: mine.numel()] = mine
    part[mine.numel() :] = 0
    comm.blocking.all_gather(full, label=label)
    return full


def add_rows(out: torch.Tensor, begin: int, width: int, rows: torch.Tensor, total: torch.Tensor) -> None:
    """Add rows of a table to the range of it that begins at element ``begin``; its borders may cut a row.

    Args:
        out: the range, 1-D.
        rows: which rows, ascending, each once; ``total``: their values, shape [n, width].
    """
    end = begin + out.numel()
    first, last = -(-begin // width), end // width  # rows that lie in the range as a whole
    if first < last:
        inside = (rows >= first) & (rows < last)
        block = out[first * width - begin : last * width - begin].view(-1, width)
        places = rows[inside] - first
        block[places] = (block[places].to(total.dtype) + total[inside]).to(out.dtype)
    for row in {begin // width, last} - set(range(first, last)):
        low, high = max(row * width, begin), min((row + 1) * width, end)
        value = total[rows == row]  # [1, width], or [0, width]
        if low < high and len(value):
            part = out[low - begin : high - begin]
            part.copy_(part.to(total.dtype) + value[0, low - row * width : high - row * width])
