"""Ranks as processes, joined by torch.distributed: which kind of communicator an axis gets.

device   ranks of the axis      communicator
cuda     any                    NCCL (its CPU tensors: Gloo)
cpu      all on one host        shared memory
cpu      on several hosts       Gloo, by direct exchange
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.direct import DirectCommunicator, Pending
from shoal.comm.failure import FailureReports
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Communicator
from shoal.comm.shm import Neighbours, is_supported, make_board, vote


class ProcessTransport:
    """How a rank that is a process reaches the others.

    Args:
        store: common to all ranks, and this world's alone (a PrefixStore).
        timeout: seconds without progress after which a wait gives up.
        shared_memory: use it where all ranks of an axis can; the same on every rank.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout: float, *, shared_memory: bool = True
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout = timeout
        self._failures = FailureReports(PrefixStore("failures", store), rank)
        self._gloo_pending = GlooPending()
        self._gloo: list[GlooCommunicator] = []
        self._pending = Pending()
        self._neighbours: Neighbours | None = None
        self._wants_shared_memory = shared_memory and device.type == "cpu"
        if self._wants_shared_memory and is_supported():
            self._neighbours = Neighbours(PrefixStore("shm", store), rank, self._failures)
        self._num_opened = 0

    def open(self, axis: str, groups: Sequence[tuple[int, ...]]) -> Communicator:
        ranks = next(group for group in groups if self._rank in group)
        self._num_opened += 1
        name = f"{self._num_opened}/{axis}/{ranks[0]}"
        if self._neighbours is not None:
            board = make_board(
                self._neighbours, PrefixStore("shm", self._store), name, ranks, self._size, self._timeout
            )
            if board is not None:
                return DirectCommunicator(axis, board, self._pending)
        elif self._wants_shared_memory:
            vote(PrefixStore("shm", self._store), name, self._size, is_fit=False)
        gloo = self._open_gloo(axis, name, ranks)
        if self._device.type == "cpu":
            return gloo
        is_whole = len(ranks) == self._size
        group = dist.group.WORLD if is_whole else dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return NcclCommunicator(axis, group, not is_whole, gloo, self._failures)

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        if self._neighbours is not None:
            self._neighbours.report(rank, text)
        self._failures.report(rank, text)
        for communicator in self._gloo:
            communicator.abandon()  # peers that wait for this rank get an error now, however long its process lives on
        if self._gloo:
            self._failures.linger(self._size)

    def close(self) -> None:
        self._gloo.clear()
        if self._neighbours is not None:
            self._neighbours.close()

    def _open_gloo(self, axis: str, name: str, ranks: tuple[int, ...]) -> GlooCommunicator:
        # Not by new_group: so only the ranks of the axis take part, and nothing of it is left when it is closed.
        try:
            group = dist.ProcessGroupGloo(
                PrefixStore(f"gloo/{name}", self._store),
                ranks.index(self._rank),
                len(ranks),
                timedelta(seconds=self._timeout),
            )
        except RuntimeError as error:
            raise self._failures.explain(error, f"joining {len(ranks)} ranks on axis {axis!r} over Gloo") from error
        communicator = GlooCommunicator(axis, group, self._failures, self._gloo_pending)
        self._gloo.append(communicator)
        return communicator
