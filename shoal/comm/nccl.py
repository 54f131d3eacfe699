"""Collectives over NCCL: its own algorithms on a stream of their own, so that they overlap with computing.

NCCL sums in the dtype of the tensor and in its own order: between GPUs the promise of rank order in fp32 is not kept.
CPU tensors (what is offloaded, and control messages) go over Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.failure import FailureReports
from shoal.comm.finished import check_both_splits, check_divides, check_peer, own_range, split_parts
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.protocol import Work
from shoal.comm.sums import is_same_memory

# The names of newer versions of torch, which warn about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclWork:
    """A call on NCCL's stream, and what the current stream does after it."""

    __slots__ = ("_accumulate", "_is_waited", "_landing", "_out", "_scale", "_work")

    def __init__(
        self,
        work: dist.Work,
        out: torch.Tensor,
        landing: torch.Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        self._work = work
        self._out = out
        self._landing = landing  # where NCCL writes, if not to out
        self._scale = scale
        self._accumulate = accumulate
        self._is_waited = False

    def wait(self) -> torch.Tensor:
        """Order: the current stream waits for NCCL's; the host does not block."""
        if self._is_waited:
            return self._out
        self._work.wait()
        self._is_waited = True
        with torch.no_grad():
            if self._landing is None:
                if self._scale != 1.0:
                    self._out.mul_(self._scale)
            else:
                total = self._landing.float() if self._landing.dtype != torch.float64 else self._landing
                if self._scale != 1.0:
                    total = total * self._scale
                self._out.copy_(self._out.to(total.dtype) + total if self._accumulate else total)
                self._landing = None
        return self._out

    def drain(self) -> None:
        """NCCL has read the source when the current stream passes ``wait()``: later kernels may overwrite it."""
        self.wait()


class NcclCommunicator:
    """The ranks along one axis, over a NCCL group of theirs."""

    def __init__(
        self, axis: str, group: dist.ProcessGroup, is_own_group: bool, host: GlooCommunicator, failures: FailureReports
    ) -> None:
        self.axis = axis
        self.rank = host.rank
        self.size = host.size
        self._group: dist.ProcessGroup | None = group
        self._is_own_group = is_own_group
        self._host = host
        self._failures = failures

    @property
    def scratch_nbytes(self) -> int:
        return self._host.scratch_nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        if full.device.type == "cpu":
            return self._host.all_gather(full, shard, label=label)
        check_divides("all_gather", full, shard, self.size, label=label)
        source = own_range(full, self.rank, self.size) if shard is None else shard
        with self._explained("all_gather", label):
            return NcclWork(_all_gather(full, source, group=self._group, async_op=True), full)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        if full.device.type == "cpu":
            return self._host.reduce_scatter(full, out, scale=scale, accumulate=accumulate, label=label)
        check_divides("reduce_scatter", full, out, self.size, label=label)
        own = own_range(full, self.rank, self.size)
        # NCCL reduces in place into the own range; elsewhere it writes to out, or beside it when out must be added to.
        is_direct = not accumulate and out.dtype == full.dtype
        landing = out if is_direct else torch.empty_like(own)
        if is_direct and is_same_memory(own, out):
            landing = own
        with self._explained("reduce_scatter", label):
            work = _reduce_scatter(landing, full, group=self._group, async_op=True)
        return NcclWork(work, out, None if is_direct else landing, scale, accumulate)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        if full.device.type == "cpu":
            return self._host.all_reduce(full, scale=scale, label=label)
        with self._explained("all_reduce", label):
            return NcclWork(dist.all_reduce(full, group=self._group, async_op=True), full, scale=scale)

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        if out.device.type == "cpu":
            return self._host.all_to_all(out, source, out_splits=out_splits, source_splits=source_splits, label=label)
        check_both_splits(out_splits, source_splits, label=label)
        split_parts(out, out_splits, self.size, label=label)
        split_parts(source, source_splits, self.size, label=label)
        splits = (
            None if out_splits is None else list(out_splits),
            None if source_splits is None else list(source_splits),
        )
        with self._explained("all_to_all", label):
            return NcclWork(dist.all_to_all_single(out, source, *splits, group=self._group, async_op=True), out)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("send", peer, self.rank, self.size, label=label)
        if tensor.device.type == "cpu":
            return self._host.send(tensor, peer, label=label)
        with self._explained("send", label):
            work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None
        return NcclWork(work, tensor)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("recv", peer, self.rank, self.size, label=label)
        if tensor.device.type == "cpu":
            return self._host.recv(tensor, peer, label=label)
        with self._explained("recv", label):
            work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None
        return NcclWork(work, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        if tensor.device.type == "cpu":
            return self._host.broadcast(tensor, source, label=label)
        with self._explained("broadcast", label):
            return NcclWork(dist.broadcast(tensor, group=self._group, group_src=source, async_op=True), tensor)

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        if vector.device.type == "cpu":
            return self._host.exchange(vector, label=label)
        result = vector.new_empty(self.size * vector.numel())
        with self._explained("exchange", label):
            work = _all_gather(result, vector.detach().clone(), group=self._group, async_op=True)
        return _Shaped(NcclWork(work, result), self.size)

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return self._host.gather_objects(value, label=label)

    def barrier(self, *, label: str) -> None:
        self._host.barrier(label=label)

    def drain(self) -> None:
        self._host.drain()

    def close(self) -> None:
        self._host.close()
        if self._group is not None and self._is_own_group:
            dist.destroy_process_group(self._group)
        self._group = None

    def _explained(self, op: str, label: str) -> _Explained:
        return _Explained(self._failures, f"{op} {label!r} on axis {self.axis!r}, over NCCL,")


class _Shaped:
    """The work of an exchange, whose result has a row a rank."""

    __slots__ = ("_rows", "_work")

    def __init__(self, work: NcclWork, rows: int) -> None:
        self._work = work
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return self._work.wait().view(self._rows, -1)

    def drain(self) -> None:
        self._work.drain()


class _Explained:
    """Turns NCCL's error inside the block into the failure that caused it."""

    def __init__(self, failures: FailureReports, what: str) -> None:
        self._failures = failures
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, dist.DistError):
            raise self._failures.explain(error, self._what) from error
