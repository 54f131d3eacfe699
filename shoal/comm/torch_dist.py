"""Ranks as processes, joined by torch.distributed: which kind of communicator an axis gets.

device   ranks of the axis      communicator
cuda     any                    NCCL (CPU tensors: Gloo)
cpu      all on one host        shared memory
cpu      on several hosts       Gloo, by direct exchange
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.direct import DirectCommunicator, Pending
from shoal.comm.failure import FailureReports, FailureWatch, FirstError, NextRank
from shoal.comm.fake import FakeCommunicator
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.nccl import NcclCommunicator, new_group
from shoal.comm.protocol import Backend
from shoal.comm.shm import LocalPeers, is_supported, join_group, vote
from shoal.errors import RankFailedError

_WATCH_SECONDS = 1.0


class ProcessTransport:
    """Opens communicators for a rank that is a process.

    Args:
        store: common to all ranks, and this world's alone (a PrefixStore).
        timeout: seconds without progress after which a wait gives up.
        shared_memory: use it where all ranks of an axis can; the same on every rank.
        watch_seconds: between two looks for a failed rank, by a thread; None: 1 with a GPU, else no thread.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        *,
        shared_memory: bool = True,
        watch_seconds: float | None = None,
    ) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout = timeout
        self._failures = FailureReports(PrefixStore("failures", store), rank)
        self._first_error = FirstError()
        self._gloo_pending = GlooPending(self._first_error)
        self._gloo: list[GlooCommunicator] = []
        self._nccl: dict[Sequence[tuple[int, ...]], dist.ProcessGroup] = {}
        if watch_seconds is None and device.type != "cpu":
            watch_seconds = _WATCH_SECONDS
        self._watch = None
        if watch_seconds is not None:
            next_rank = NextRank(PrefixStore("watch", store), rank, size)
            self._watch = FailureWatch(self._failures, self._abort, watch_seconds, next_rank)
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
                self._local_peers, PrefixStore("shm", self.store), name, ranks, self._size, self._timeout
            )
            if group is not None:
                return DirectCommunicator(axis, group, self._pending)
        elif self._wants_shared_memory:
            vote(PrefixStore("shm", self.store), name, self._size, is_fit=False)
        nccl = None if self._device.type == "cpu" else self._open_nccl(name, groups, ranks)
        if len(ranks) == 1:
            return FakeCommunicator(axis, 0, 1)
        gloo = self._open_gloo(axis, name, ranks)
        if nccl is None:
            return gloo
        return NcclCommunicator(axis, nccl, gloo, self._failures, self._first_error)

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
        if self._watch is not None:
            self._watch.stop()
        self._gloo_pending.watch.stop()
        self._gloo.clear()
        for group in self._nccl.values():
            with contextlib.suppress(RuntimeError):  # it may be aborted already
                dist.destroy_process_group(group)
        self._nccl.clear()
        if self._local_peers is not None:
            self._local_peers.close()

    def _abort(self, failure: RankFailedError) -> None:
        """Called by the watch's thread: end every NCCL kernel under way, so that this rank's thread runs again.

        What it runs next with a communicator raises ``failure``. Gloo's connections are closed by the rank that failed.
        """
        self._first_error.keep(failure)
        for group in list(self._nccl.values()):
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _open_nccl(self, name: str, groups: Sequence[tuple[int, ...]], ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The NCCL group of ``ranks``. Axes with the same groups share one: each costs device memory.

        A rank that is alone makes one too: NCCL may split all of them from one parent, in which every rank takes part.
        """
        group = self._nccl.get(groups)
        if group is None:
            timeout = timedelta(seconds=self._timeout)
            group = self._nccl[groups] = new_group(self.store, f"shoal/nccl/{name}", ranks, self._device, timeout)
        return group

    def _open_gloo(self, axis: str, name: str, ranks: tuple[int, ...]) -> GlooCommunicator:
        # Not by new_group, in which all ranks take part and which keeps state after it is destroyed.
        try:
            group = dist.ProcessGroupGloo(
                PrefixStore(f"gloo/{name}", self.store),
                ranks.index(self._rank),
                len(ranks),
                timedelta(seconds=self._timeout),
            )
        except RuntimeError as error:
            raise self._failures.explain(error, f"joining {len(ranks)} ranks on axis {axis!r} over Gloo") from error
        communicator = GlooCommunicator(axis, group, self._failures, self._gloo_pending)
        self._gloo.append(communicator)
        self._gloo_pending.watch.start()
        return communicator
