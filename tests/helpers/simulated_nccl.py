"""``shoal.comm.nccl`` on the simulated accelerator: the code that GPUs run, over ranks that are threads.

    Communicator -> NcclCommunicator -> torch.distributed -> SimulatedGroup -> SimulatedCommunicator -> threads
                          \\-> HostRanks (in place of Gloo) ---------------------^

``SimulatedGroup`` takes the place of torch's ProcessGroupNCCL, bound to its device: every operation, messages included,
runs on the group's one stream. It begins after what the current stream has queued when it is issued, keeps its tensors
alive until ``work.wait()``, which makes the current stream wait and does not block the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shoal.comm.failure import FirstError
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Backend, Call, Work
from shoal.simulation import accesses
from shoal.simulation.accelerator import SimulatedAccelerator, SimulatedPool
from shoal.simulation.collectives import SimulatedCommunicator, SimulatedWork
from shoal.simulation.collectives import accesses as calls_accesses

_ProcessGroup: Any = dist.ProcessGroup  # the stubs of torch overload every operation


class SimulatedGroup(_ProcessGroup):
    """torch's ProcessGroupNCCL.

    Attributes: ``label``: of the call under way, for reports; ``labels``: of its messages. ``pools``: that are
    registered, and True for symmetric ones.
    """

    mem_allocator = "ncclMemAlloc"

    def __init__(self, comm: SimulatedCommunicator, accelerator: SimulatedAccelerator) -> None:
        super().__init__(comm.rank, comm.size)
        self.label, self.labels = "", ("",)
        self.pools: dict[SimulatedPool, bool] = {}
        self._batch: list[Call] | None = None
        self._comm, self._accelerator = comm, accelerator

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    def register_mem_pool(self, pool: SimulatedPool, symm: bool = False) -> None:
        assert pool not in self.pools
        self.pools[pool] = symm

    def deregister_mem_pool(self, pool: SimulatedPool) -> None:
        del self.pools[pool]

    def _issue(self, call: Call) -> GroupWork:
        for tensor in itertools.chain(*calls_accesses(call)):
            assert not self._accelerator.is_host(tensor), f"NCCL is given host memory for {call.verb} {call.label!r}"
        return GroupWork(self._accelerator, cast(SimulatedWork, self._comm.issue(call)))

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> GroupWork:
        assert opts.asyncOp
        # torch gives complex numbers as rows of two.
        return self._issue(Call("all_gather", self.label, output.view(-1), source.view(-1)))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> GroupWork:
        assert opts.asyncOp and output.dtype == source.dtype
        return self._issue(Call("reduce_scatter", self.label, output, source, scale=self._scale(opts.reduceOp)))

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> GroupWork:
        assert opts.asyncOp
        return self._issue(Call("all_reduce", self.label, tensors[0], scale=self._scale(opts.reduceOp)))

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, outs: list[int], sources: list[int], opts: Any
    ) -> GroupWork:
        assert opts.asyncOp
        splits = {"out_splits": outs, "source_splits": sources} if outs else {}
        return self._issue(Call("all_to_all", self.label, output, source, **splits))

    # the names of older versions of torch
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> GroupWork:
        assert opts.asyncOp
        return self._issue(Call("broadcast", self.label, tensors[0], peer=opts.rootRank))

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> GroupWork | None:
        return self._message(Call("send", self.label, tensors[0], peer=peer))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> GroupWork | None:
        return self._message(Call("recv", self.label, tensors[0], peer=peer))

    def _message(self, call: Call) -> GroupWork | None:
        if self._batch is None:
            return self._issue(call)
        self._batch.append(call._replace(label=self.labels[len(self._batch)]))
        return None  # the work is of the batch

    def _start_coalescing(self, device: torch.device) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        assert self._batch
        messages, self._batch = tuple(self._batch), None
        return self._issue(Call("batch", self.label, messages[-1].result, messages=messages))

    def _scale(self, operation: Any) -> float:
        """The factor of a reduction."""
        kind, factor = operation.__getstate__()
        if kind == dist.ReduceOp.PREMUL_SUM:
            return float(factor)
        assert kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        return 1.0 if kind == dist.ReduceOp.SUM else 1 / self._comm.size


class GroupWork:
    """torch's Work: one may wait for it on several streams."""

    def __init__(self, accelerator: SimulatedAccelerator, work: SimulatedWork) -> None:
        self._accelerator, self.simulated = accelerator, work

    def wait(self) -> None:
        if self.simulated._is_waited:
            self._accelerator.current().wait_event(self.simulated._event)
        self.simulated.wait()


class HostRanks(Backend):
    """Gloo: the host reads what it sends when it issues a call, and blocks until it has written the result."""

    def __init__(self, comm: SimulatedCommunicator, accelerator: SimulatedAccelerator) -> None:
        super().__init__(comm.axis, comm.rank, comm.size)
        self._comm, self._accelerator = comm, accelerator
        # All but ``issue`` is of the host in either; mypy wants no method to be assigned.
        self.gather_objects, self.barrier, self.drain, self.close = (  # type: ignore[method-assign]
            comm.gather_objects,
            comm.barrier,
            comm.drain,
            comm.close,
        )

    def issue(self, call: Call) -> Work:
        if call.messages:
            return self.issue_each(call)
        for tensor in (call.result, call.sent):
            assert self._accelerator.is_host(tensor), f"Gloo is given device memory for {call.verb} {call.label!r}"
        if call.verb != "recv":
            self._accelerator.host_access(f"{call.verb} {call.label!r} over Gloo", [call.sent], [])
        return HostWork(self._accelerator, self._comm.issue(call), call)


class HostWork:
    def __init__(self, accelerator: SimulatedAccelerator, work: Work, call: Call) -> None:
        self._accelerator, self._work, self._call = accelerator, work, call

    def wait(self) -> torch.Tensor:
        result = self._work.wait()
        if self._call.verb != "send":
            self._accelerator.host_access(f"{self._call.verb} {self._call.label!r} over Gloo", [], [result])
        return result

    def drain(self) -> None:
        self.wait()
        self._work.drain()


class SimulatedNccl(NcclCommunicator):
    """Shoal's communicator over a simulated group: names each call for reports."""

    def __init__(self, comm: SimulatedCommunicator, accelerator: SimulatedAccelerator) -> None:
        group, host = SimulatedGroup(comm, accelerator), HostRanks(comm, accelerator)
        super().__init__(comm.axis, group, cast(GlooCommunicator, host), cast(Any, None), FirstError())
        self._simulated_group = group

    def issue(self, call: Call) -> Work:
        self._simulated_group.label = call.label
        self._simulated_group.labels = tuple(one.label for one in call.messages or (call,))
        return super().issue(call)


@contextmanager
def nccl_in_simulation() -> Iterator[None]:
    """Inside the block, ``check_streams`` runs collectives through ``shoal.comm.nccl``."""
    simulated = SimulatedAccelerator.communicator

    def communicator(
        accelerator: SimulatedAccelerator,
        backend: Backend,
        ranks: tuple[int, ...],
        shared: dict[str, Any] | None,
        number: int,
    ) -> Backend:
        comm = simulated(accelerator, backend, ranks, shared, number)
        return comm if accelerator.times is not None else SimulatedNccl(comm, accelerator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedAccelerator, "communicator", communicator)
        patch.setattr(accesses, "_SKIPPED", (*accesses._SKIPPED, __file__))
        yield
