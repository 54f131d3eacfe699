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
from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Backend
from shoal.comm.shm import LocalPeers, is_supported, join_group, vote
from shoal.comm.single import SingleCommunicator
from shoal.errors import RankFailedError


class ProcessTransport:
    """Opens communicators for a rank that is a process.

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
        self._first_error = FirstError()
        self._gloo_pending = GlooPending(self._first_error)
        self._gloo: list[GlooCommunicator] = []
        self._pending = Pending(self._first_error)
        self._local_peers: LocalPeers | None = None
        self._wants_shared_memory = shared_memory and device.type == "cpu"
        if self._wants_shared_memory and is_supported():
            self._local_peers = LocalPeers(PrefixStore("shm", store), rank, self._failures)
        self._num_opened = 0

    def open(self, axis: str, groups: Sequence[tuple[int, ...]]) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        self._num_opened += 1
        name = f"{self._num_opened}/{axis}/{ranks[0]}"
        if self._local_peers is not None:
            group = join_group(
                self._local_peers, PrefixStore("shm", self._store), name, ranks, self._size, self._timeout
            )
            if group is not None:
                return DirectCommunicator(axis, group, self._pending)
        elif self._wants_shared_memory:
            vote(PrefixStore("shm", self._store), name, self._size, is_fit=False)
        if len(ranks) == 1:
            return SingleCommunicator(axis)
        gloo = self._open_gloo(axis, name, ranks)
        if self._device.type == "cpu":
            return gloo
        is_whole = len(ranks) == self._size
        nccl = dist.group.WORLD if is_whole else dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(nccl, dist.ProcessGroup)
        return NcclCommunicator(axis, nccl, not is_whole, gloo, self._failures)

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        if self._local_peers is not None:
            self._local_peers.report(rank, text)
        self._failures.report(rank, text)
        self._first_error.keep(RankFailedError(rank, text))
        for communicator in self._gloo:
            communicator.abandon()  # peers that wait for this rank get an error now, even if its process runs on
        if self._gloo:
            self._failures.linger(self._size)

    def close(self) -> None:
        self._gloo.clear()
        if self._local_peers is not None:
            self._local_peers.close()

    def _open_gloo(self, axis: str, name: str, ranks: tuple[int, ...]) -> GlooCommunicator:
        # Not by new_group, in which all ranks take part and which keeps state after it is destroyed.
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
