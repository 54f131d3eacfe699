"""Collectives over NCCL, on a stream of high priority, so that they overlap with computing.

NCCL sums in the dtype of the tensor and in its own order: the promise of rank order in fp32 holds on CPU only. A sum is
scaled in two steps, ``before`` in NCCL's kernel (AVG or PREMUL_SUM) and ``after`` in the kernel that writes the result:

    dtype       before                                         after
    fp32, fp64  scale                                          1
    bf16        the power of two nearest to scale              the other factor: 1 if scale is a power of two
    fp16        about 1 / sqrt(ranks), as FSDP2                the other factor

A power of two changes no bits of a 16-bit value. In fp16 the part before keeps the sum from overflowing, and is not the
whole factor, so that small values do not underflow. Only a 16-bit result that NCCL writes itself and whose second
factor is not 1 costs a kernel of its own.

CPU tensors (offloaded state, control messages) go over Gloo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.finished import check_both_splits, check_divides, check_peer, own_range, split_parts
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.protocol import Work
from shoal.comm.sums import is_same_memory
from shoal.errors import CommError

# The names of newer versions of torch, which warn about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_premul_sum: Any = torch._C._distributed_c10d._make_nccl_premul_sum


def new_group(ranks: Sequence[int], device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """A NCCL group of Shoal's own, bound to ``device``; every rank of the world makes one at the same time.

    Not the default group, even for all ranks: its streams have no high priority, and to abort it is the user's matter.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = dist.new_group(list(ranks), timeout, "nccl", options, use_local_synchronization=True, device_id=device)
    assert isinstance(group, dist.ProcessGroup)
    return group


def split_scale(scale: float, dtype: torch.dtype, size: int) -> tuple[float, float]:
    """``scale`` as a factor before the sum over ``size`` ranks and one after it; see the module.

    >>> [split_scale(1 / 8, dtype, 8) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    [(0.125, 1.0), (0.125, 1.0), (0.25, 0.5)]
    """
    if dtype == torch.float16:
        before = 1.0
        while size * before * before > 1.0:
            before /= 2
    elif dtype == torch.bfloat16 and scale != 0.0:
        before = 2.0 ** round(math.log2(abs(scale)))
    elif dtype.is_floating_point:
        return scale, 1.0
    else:
        before = 1.0
    return before, scale / before


def _operation(before: float, size: int) -> Any:
    """NCCL's reduction that multiplies every rank's values by ``before`` and sums them."""
    if before == 1.0:
        return dist.ReduceOp.SUM
    return dist.ReduceOp.AVG if before * size == 1.0 else _premul_sum(before)


class NcclWork:
    """A call on NCCL's stream, and what the current stream does after it.

    Args:
        landing: where NCCL writes, if not to ``out``.
        after: a factor for what NCCL has written. Shape: [1], fp32; None: 1.
    """

    __slots__ = ("_accumulate", "_after", "_comm", "_is_waited", "_landing", "_out", "_what", "_work")

    def __init__(
        self,
        comm: NcclCommunicator,
        what: str,
        work: dist.Work | None,
        out: torch.Tensor,
        landing: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        assert work is not None  # this rank is in the group
        self._comm = comm
        self._what = what
        self._work = work
        self._out = out
        self._landing = landing
        self._after = after
        self._accumulate = accumulate
        self._is_waited = False

    def wait(self) -> torch.Tensor:
        """Order: the current stream waits for NCCL's; the host does not block."""
        if self._is_waited:
            return self._out
        with self._comm.explained(self._what):
            self._work.wait()
        self._is_waited = True
        with torch.no_grad():
            self._write(self._out if self._landing is None else self._landing)
        self._landing = None
        return self._out

    def drain(self) -> None:
        """NCCL has read the source when the current stream passes ``wait()``: later kernels may overwrite it."""
        self.wait()

    def _write(self, landed: torch.Tensor) -> None:
        """``out = after * landed`` or ``out += after * landed``, in one kernel, in fp32."""
        out, after = self._out, self._after
        if self._accumulate:
            if after is None:
                out.add_(landed)
            else:
                torch.addcmul(out, landed, after, out=out)
        elif after is not None:
            torch.mul(landed, after, out=out)
        elif landed is not out:
            out.copy_(landed)


class NcclCommunicator:
    """The ranks along one axis, over a NCCL group, which the transport closes."""

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup,
        host: GlooCommunicator,
        failures: FailureReports,
        first_error: FirstError,
    ) -> None:
        self.axis = axis
        self.rank = host.rank
        self.size = host.size
        self._group: dist.ProcessGroup | None = group
        self._host = host
        self._failures = failures
        self._first_error = first_error
        self._factors: dict[tuple[float, torch.device], torch.Tensor] = {}

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
        what = self._what("all_gather", label)
        with self.explained(what):
            return NcclWork(self, what, _all_gather(full, source, group=self._group, async_op=True), full)

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
        before, after = split_scale(scale, full.dtype, self.size)
        what = self._what("reduce_scatter", label)
        with self.explained(what):
            work = _reduce_scatter(landing, full, _operation(before, self.size), group=self._group, async_op=True)
        return NcclWork(self, what, work, out, None if is_direct else landing, self._factor(after, full), accumulate)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        if full.device.type == "cpu":
            return self._host.all_reduce(full, scale=scale, label=label)
        before, after = split_scale(scale, full.dtype, self.size)
        what = self._what("all_reduce", label)
        with self.explained(what):
            work = dist.all_reduce(full, _operation(before, self.size), group=self._group, async_op=True)
        return NcclWork(self, what, work, full, after=self._factor(after, full))

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
        what = self._what("all_to_all", label)
        with self.explained(what):
            work = dist.all_to_all_single(
                out,
                source,
                None if out_splits is None else list(out_splits),
                None if source_splits is None else list(source_splits),
                group=self._group,
                async_op=True,
            )
        return NcclWork(self, what, work, out)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("send", peer, self.rank, self.size, label=label)
        if tensor.device.type == "cpu":
            return self._host.send(tensor, peer, label=label)
        what = self._what("send", label)
        with self.explained(what):
            return NcclWork(self, what, dist.isend(tensor, group=self._group, group_dst=peer), tensor)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("recv", peer, self.rank, self.size, label=label)
        if tensor.device.type == "cpu":
            return self._host.recv(tensor, peer, label=label)
        what = self._what("recv", label)
        with self.explained(what):
            return NcclWork(self, what, dist.irecv(tensor, group=self._group, group_src=peer), tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        if tensor.device.type == "cpu":
            return self._host.broadcast(tensor, source, label=label)
        what = self._what("broadcast", label)
        with self.explained(what):
            work = dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        return NcclWork(self, what, work, tensor)

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        if vector.device.type == "cpu":
            return self._host.exchange(vector, label=label)
        result = vector.new_empty(self.size, vector.numel())
        what = self._what("exchange", label)
        with self.explained(what):
            work = _all_gather(result.view(-1), vector.detach().clone(), group=self._group, async_op=True)
        return NcclWork(self, what, work, result)

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return self._host.gather_objects(value, label=label)

    def barrier(self, *, label: str) -> None:
        self._host.barrier(label=label)

    def drain(self) -> None:
        self._host.drain()

    def close(self) -> None:
        self._host.close()
        self._group = None
        self._factors.clear()

    def explained(self, what: str) -> _Explained:
        """Turns NCCL's error inside the block into the failure that caused it."""
        return _Explained(self._failures, self._first_error, what)

    def _what(self, op: str, label: str) -> str:
        return f"{op} {label!r} on axis {self.axis!r}, over NCCL,"

    def _factor(self, after: float, full: torch.Tensor) -> torch.Tensor | None:
        """``after`` as a tensor of one element: unlike a number it makes a 16-bit product an fp32 one."""
        if after == 1.0:
            return None
        found = self._factors.get((after, full.device))
        if found is None:
            found = torch.full((1,), after, dtype=torch.float32, device=full.device)
            self._factors[after, full.device] = found
        return found


class _Explained:
    def __init__(self, failures: FailureReports, first_error: FirstError, what: str) -> None:
        self._failures = failures
        self._first_error = first_error
        self._what = what

    def __enter__(self) -> None:
        self._first_error.check()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # An aborted group raises what NCCL says; the reason is the failure that the watch has found.
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            self._first_error.check()
            if isinstance(error, dist.DistError):
                found = self._failures.explain(error, self._what)
                self._first_error.keep(found)
                raise found from error
