"""An all-to-all of rows in two steps: among the ranks of a node, then among ranks of equal coordinate on the nodes.

    rank = node * (ranks of a node) + local; 2 nodes of 2 ranks; "ab": the rows from rank a to rank b

    rank 0 has             00 01 02 03
    sorted by local        00 02 | 01 03        the step along ``local`` sends the first to rank 0, the others to rank 1
    has then               00 02 10 12          all rows from node 0 to ranks 0 and 2, whose coordinate is 0
    sorted by node         00 10 | 02 12        the step along ``node`` sends the first to rank 0, the others to rank 2
    has then               00 10 20 30          what one all-to-all among all ranks gives, to the bit

Each rank exchanges one message with each other node, not one with each rank of it. Rows for other nodes move twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.protocol import Communicator

Counts = Sequence[Sequence[int]]  # rows by source and target


class TwoStepRows:
    """The rows from every rank for this one: the first step is issued at construction, the second by ``wait``.

    Args:
        rows: [rows, width], by target.
        counts: the rows from each rank to each.
        local: the ranks of this node.
        node: the ranks of this coordinate, one of each node.

    Communicates: one all-to-all along ``local`` and one along ``node``.
    """

    def __init__(self, rows: Tensor, counts: Counts, local: Communicator, node: Communicator, label: str) -> None:
        self._local, self._node, self._label = local, node, label
        this = node.rank * local.size + local.rank
        ranks = [[at * local.size + peer for peer in range(local.size)] for at in range(node.size)]  # by node
        column = [ranks[at][local.rank] for at in range(node.size)]  # those of this coordinate
        row = ranks[node.rank]  # those of this node
        by_local = [[counts[this][ranks[at][peer]] for at in range(node.size)] for peer in range(local.size)]
        self._passed_on = [[counts[peer][target] for target in column] for peer in row]
        self._received = [sum(counts[peer][this] for peer in of_node) for of_node in ranks]
        in_order = _transposed(rows, counts[this], node.size, local)
        self._width = rows.shape[1]
        self._out = rows.new_empty(sum(map(sum, self._passed_on)), self._width)
        self._work = self._issue(local, self._out, in_order, map(sum, self._passed_on), map(sum, by_local))
        self._source = in_order

    def wait(self) -> Tensor:
        """The rows for this rank, by source. Shape: [rows, width]."""
        self._work.drain()
        lengths = [count for of_source in self._passed_on for count in of_source]
        source = _transposed(self._out, lengths, self._local.size, self._node)
        out = source.new_empty(sum(self._received), self._width)
        sent = map(sum, zip(*self._passed_on, strict=True))
        self._issue(self._node, out, source, self._received, sent).drain()
        return out

    def _issue(self, comm: Communicator, out: Tensor, rows: Tensor, received: Any, sent: Any) -> Any:
        return comm.all_to_all(
            out.view(-1),
            rows.view(-1),
            out_splits=[count * self._width for count in received],
            source_splits=[count * self._width for count in sent],
            label=f"{self._label} along {comm.axis}",
        )


def _transposed(rows: Tensor, lengths: Sequence[int], outer: int, comm: Communicator) -> Tensor:
    """Segments that are sorted by an outer and an inner index, sorted by the inner one first, in memory of ``comm``.

    Args:
        outer: the number of outer indices.
    """
    segments = rows.split(list(lengths))
    inner = len(segments) // outer
    in_order = [segments[first * inner + second] for second in range(inner) for first in range(outer)]
    return torch.cat(in_order, out=comm.empty(rows.numel(), rows.dtype, rows.device).view(rows.shape))
