"""Ranks as processes, joined by torch.distributed: which kind of communicator an axis gets.

device   ranks of the axis      communicator
cuda     any                    NCCL (CPU tensors, and an axis for them alone: Gloo)
cpu      all on one host        shared memory
cpu      on several hosts       Gloo, by direct exchange

Axes with the same groups of ranks share one NCCL group, since each costs device memory, and all axes share one
connection over Gloo to each rank that one of them needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.direct import DirectCommunicator, Pending
from shoal.comm.failure import FailureReports, FailureWatch, FirstError, NextRank
from shoal.comm.fake import FakeCommunicator
from shoal.comm.gloo import GlooCommunicator, GlooPending
from shoal.comm.gloo_links import GlooLinks
from shoal.comm.named_group import abort_groups, destroy_groups
from shoal.comm.nccl import NcclCommunicator, new_group
from shoal.comm.protocol import Backend
from shoal.comm.shm import LocalPeers, is_supported, join_group, vote
from shoal.errors import CommError, RankFailedError
from shoal.hang import RankProcesses

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
        self._processes = RankProcesses(PrefixStore("hang", store), size)
        self._failures = FailureReports(PrefixStore("failures", store), rank, processes=self._processes)
        self._first_error = FirstError()
        self._gloo_pending = GlooPending(self._first_error)
        self._links = GlooLinks(PrefixStore("gloo", store), rank, timeout)
        self._gloo: list[GlooCommunicator] = []
        self._nccl: dict[tuple[Sequence[tuple[int, ...]], int | None, int], dist.ProcessGroup] = {}
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

    def open(
        self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None = None, number: int = 0
    ) -> Backend:
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
        has_nccl = self._device.type != "cpu" and max_ctas != 0
        nccl = self._open_nccl(name, groups, ranks, max_ctas, number) if has_nccl else None
        if len(ranks) == 1:
            return FakeCommunicator(axis, 0, 1)
        is_mesh = not has_nccl and max_ctas not in (0, 1)
        gloo = GlooCommunicator(
            axis, self._links, ranks, self._num_opened, self._failures, self._gloo_pending, is_mesh=is_mesh
        )
        if not self._gloo:
            self._processes.look_up([0])  # now, since the store may end with it
        self._gloo.append(gloo)
        self._gloo_pending.watch.start()
        return gloo if nccl is None else NcclCommunicator(axis, nccl, gloo, self._failures, self._first_error)

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
        self._links.close()
        destroy_groups(list(self._nccl.values()), has_failed=self._first_error.error is not None)
        self._nccl.clear()
        if self._local_peers is not None:
            self._local_peers.close()

    def _abort(self, failure: RankFailedError) -> None:
        """Called by the watch's thread: end every NCCL kernel under way, so that this rank's thread runs again.

        What it runs next with a communicator raises ``failure``. Gloo's connections are closed by the rank that failed.
        """
        self._first_error.keep(failure)
        abort_groups(list(self._nccl.values()))

    def _meet(self, name: str) -> None:
        """Wait until all ranks are here. One that has failed is found here, and never where NCCL waits for it.

        Raises: CommError: a rank has failed, or has not come in time.
        """
        store, pause, end = PrefixStore("nccl", self.store), 0.001, time.monotonic() + self._timeout
        store.add(name, 1)
        while (count := store.add(name, 0)) < self._size:
            self._first_error.check()
            if time.monotonic() >= end:
                raise CommError(
                    f"{count} of {self._size} ranks have come within {self._timeout:g} s to make a group of NCCL.",
                    where=f"rank {self._rank}",
                    do="see what the other ranks were doing; if they were slow, give init_distributed more time.",
                    code="comm-timeout",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    def _open_nccl(
        self, name: str, groups: Sequence[tuple[int, ...]], ranks: tuple[int, ...], max_ctas: int | None, number: int
    ) -> dist.ProcessGroup:
        """The NCCL group of ``ranks``.

        A rank that is alone makes one too: NCCL may split all of them from one parent, in which every rank takes part.
        One without a bound serves axes that have one.
        """
        group = self._nccl.get((groups, None, number)) or self._nccl.get((groups, max_ctas, number))
        if group is None:
            self._meet(str(self._num_opened))
            timeout = timedelta(seconds=self._timeout)
            group = new_group(self.store, f"shoal/nccl/{name}", ranks, self._device, timeout, max_ctas)
            self._nccl[groups, max_ctas, number] = group
        return group
