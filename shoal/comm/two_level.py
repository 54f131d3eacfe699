"""An axis over several nodes in two levels: what crosses between nodes is sent once, and in a format of its own.

    rank = node * ranks of a node + place in it

    all_gather      between: each rank gathers the shards of its place; inside: the shards of one node after the other
    reduce_scatter  inside: an all_to_all, each rank sums its node's values of its place's ranges; between: the same
                    among the ranks of one place, each of which gets its range

Each rank receives ``nodes - 1`` shards from other nodes in place of ``ranks - ranks of a node``. Without a format,
reductions are those of one level, whose sums are taken in rank order.

Sources: ZeRO++ qgZ (arXiv:2306.10209, section 3.3), MiCS (arXiv:2205.00119, section 3.2.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from shoal.comm.protocol import (
    BatchWork,
    Communicator,
    FinishedWork,
    Work,
    encoded_all_gather,
    encoded_all_reduce,
    own_range,
)
from shoal.comm.wire import Wire, decoded_sum, encoded_scatter
from shoal.streams import keep_for_current_stream


class TwoLevels:
    """The ranks along an axis, as nodes of equal size.

    Args:
        comm: all of them.
        inside: those of this node.
        between: those at this rank's place in each node.
        is_gather_split: all_gathers are made in two levels, too (MiCS); else in one.
    """

    def __init__(
        self, comm: Communicator, inside: Communicator, between: Communicator, *, is_gather_split: bool = False
    ) -> None:
        self.comm = comm
        self.inside = inside
        self.between = between
        self.is_gather_split = is_gather_split
        self.rank = comm.rank
        self.size = comm.size

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: Wire | None = None
    ) -> Work:
        """As ``Communicator.all_gather``.

        Communicates: where gathers are split: (nodes - 1) shards received per rank from other nodes, and from its own
            node the rest.
        """
        source = own_range(full, self.rank, self.size) if shard is None else shard
        if wire is not None:
            return encoded_all_gather(self, self.comm, full, source, label=label, wire=wire)
        if not self.is_gather_split:
            return self.comm.all_gather(full, shard, label=label)
        nodes, width = self.between.size, self.inside.size
        places = full.view(nodes, width, -1)
        mine = self.comm.empty(nodes * source.numel(), full.dtype, full.device)

        def gather_nodes(before: Work) -> Work:
            shards = before.wait().chunk(nodes)
            pairs = zip(places, shards, strict=True)
            return BatchWork([self.inside.all_gather(into.view(-1), shard, label=label) for into, shard in pairs])

        def finish(before: Work) -> Work:
            before.wait()
            keep_for_current_stream(mine)
            return FinishedWork(full)

        first = partial(self.between.all_gather, mine, source, label=label)
        return self.between.staged(full, first, gather_nodes, finish)

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
        """As ``Communicator.reduce_scatter``.

        Communicates: with ``wire``: inside of the node (ranks of a node - 1) / (ranks of a node) * full, in
            ``wire.format``; between nodes (nodes - 1) shards, in ``wire.between``.
        """
        if wire is None:
            return self.comm.reduce_scatter(full, out, scale=scale, accumulate=accumulate, label=label)
        nodes, width = self.between.size, self.inside.size

        def by_place(flat: torch.Tensor) -> torch.Tensor:
            """For each place its ranges on all nodes. Shape: [places, nodes * numel of a range]."""
            return flat.view(nodes, width, -1).transpose(0, 1).reshape(width, -1)

        with torch.no_grad():
            rows = by_place(full)
            error = None if wire.error is None else by_place(wire.error)
            message, received, layout = encoded_scatter(replace(wire, error=error), rows, self.comm.empty)
            if error is not None and wire.error is not None:
                wire.error.view(nodes, width, -1).copy_(error.view(width, nodes, -1).transpose(0, 1))
        outer = Wire(wire.between or wire.format)

        def sum_node(before: Work) -> Work:
            total = torch.empty(rows.shape[1], dtype=torch.float32, device=full.device)
            decoded_sum(wire.format, layout.parts(before.wait(), width), total, scale=1.0, accumulate=False)
            keep_for_current_stream(message, received)
            return self.between.reduce_scatter(total, out, scale=scale, accumulate=accumulate, label=label, wire=outer)

        return self.inside.staged(full, lambda: self.inside.all_to_all(received, message, label=label), sum_node)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str, wire: Wire | None = None) -> Work:
        """As ``Communicator.all_reduce``; with ``wire`` its two halves in two levels."""
        if wire is None:
            return self.comm.all_reduce(full, scale=scale, label=label)
        return encoded_all_reduce(self, self.comm, full, scale=scale, label=label, wire=wire)
