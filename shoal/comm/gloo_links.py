"""The connections of a rank to others over Gloo, made one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.environment import chosen_interfaces


class GlooLinks:
    """The connections of a rank to others, over Gloo.

    Gloo connects all ranks of a group, so there is a group of two ranks for each connection. They share one thread and
    one socket that listens. (Gloo's ``lazy_init`` connects on first use. A rank whose peer has ended, or does not use
    the connection, may then wait without a limit, and ``abort`` does not end that.)

    Args:
        store: common to all ranks, for these connections alone.
        rank: this rank, as ``connect`` counts them.
    """

    def __init__(self, store: Store, rank: int, timeout_seconds: float) -> None:
        self.rank = rank
        self._store = store
        self._timeout = timedelta(seconds=timeout_seconds)
        self._options: Any = None
        self._groups: dict[int, Any] = {}

    def connect(self, ranks: Sequence[int], peers: Iterable[int]) -> None:
        """Connect to the ranks at ``peers`` in ``ranks``, which call with this one among theirs.

        Raises: RuntimeError: one of them did not call within the time-out.
        Communicates: at most 5 requests to the store for each connection that there was not.
        """
        own = ranks.index(self.rank)
        for peer in sorted(peers, key=lambda peer: _turn(own, peer, len(ranks))):
            if ranks[peer] not in self._groups:
                low, high = sorted((self.rank, ranks[peer]))
                store = PrefixStore(f"{low}-{high}", self._store)
                self._groups[ranks[peer]] = dist.ProcessGroupGloo(
                    store, int(self.rank == high), 2, self._shared_options()
                )

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._groups[rank].send([tensor], int(self.rank < rank), tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return self._groups[rank].recv([tensor], int(self.rank < rank), tag)

    def abort(self) -> None:
        """Close all connections, although works are under way. Never raises."""
        while self._groups:
            with contextlib.suppress(RuntimeError):
                self._groups.popitem()[1].abort()

    def close(self) -> None:
        self._groups.clear()

    def _shared_options(self) -> Any:
        if self._options is None:
            gloo: Any = dist.ProcessGroupGloo
            names = chosen_interfaces()[0]
            self._options = gloo._Options()
            self._options._timeout = self._timeout
            self._options._threads = 0  # which only Gloo's own collectives use
            self._options._devices = [
                gloo.create_device(interface=name, lazy_init=False)
                if name
                else gloo.create_default_device(lazy_init=False)
                for name in names.split(",")
            ]
        return self._options


def _turn(rank: int, peer: int, size: int) -> tuple[int, int, int]:
    """The same for both ranks of a connection, which each makes in this order: no two wait for each other."""
    distance, start = min(((peer - rank) % size, rank), ((rank - peer) % size, peer))
    return distance, start // distance % 2, start
