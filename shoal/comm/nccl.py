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

A group with registered memory sums fp32, fp64 and bf16 unscaled, and the factor comes after: NCCL sums in the switch
(NVLS) and in symmetric windows for its plain sum only.

CPU tensors (offloaded state, control messages) go over Gloo.

Ranks that issue different calls hang, or take one tensor for another: unlike the other backends, NCCL compares nothing.
``ComparedCommunicator`` does, for ``debug.collective_check``:

    rank 0  all_reduce 'gradient' of 8 x float32 --\\  exchange of these lines          they differ: all ranks raise
    rank 1  all_gather 'layers.3' of 8 x float32 --/  between the hosts, then compare  they are alike: all ranks begin
"""

from __future__ import annotations

import math
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.memory_group import GroupCall
from shoal.comm.named_group import named_group
from shoal.comm.parts import symmetric_memory_error
from shoal.comm.protocol import (
    Backend,
    Call,
    Communicator,
    FinishedWork,
    StagedWork,
    Work,
    calls_differ,
    closed_error,
    exchange_of,
    own_range,
    split_mismatch,
)
from shoal.comm.sums import is_same_memory
from shoal.errors import CommError
from shoal.process import node
from shoal.streams import MemoryPool, host_memory, is_in_host_memory, simulation

# The names of newer versions of torch, which warn about the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_coalescing: Any = dist.distributed_c10d._coalescing_manager
_premul_sum: Any = torch._C._distributed_c10d._make_nccl_premul_sum
_TEXT_BYTES = 160  # of a call's description
_LABEL = "comparison of calls"
_OPENS = "symmetric memory"
_LEAST_WORKSPACE = 2 * 2**20  # what CUDA allocates at least


def new_group(
    store: Store,
    name: str,
    ranks: Sequence[int],
    device: torch.device,
    timeout: timedelta,
    max_ctas: int | None = None,
) -> dist.ProcessGroup:
    """A NCCL group of Shoal's own, bound to ``device``; every rank of the world makes one at the same time.

    Not the default group, even for all ranks: its streams have no high priority, and to abort it is the user's matter.

    Args:
        max_ctas: the most channels, each with buffers and a multiprocessor of its own; None: as many as NCCL wants.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is not the group's
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return named_group(store, name, ranks, backend="nccl", options=options, timeout=timeout, device=device)


def split_scale(scale: float, dtype: torch.dtype, size: int, *, is_registered: bool = False) -> tuple[float, float]:
    """``scale`` as a factor before the sum over ``size`` ranks and one after it; see the module.

    >>> [split_scale(1 / 8, dtype, 8) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    [(0.125, 1.0), (0.125, 1.0), (0.25, 0.5)]
    """
    if dtype == torch.float16:
        before = 1.0
        while size * before * before > 1.0:
            before /= 2
    elif is_registered:
        before = 1.0
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


class NcclPool:
    """A ``MemoryPool`` of torch's; ``allocator``: NCCL's."""

    def __init__(self, device: torch.device, allocator: Any) -> None:
        self._device = device
        self.native = torch.cuda.MemPool(allocator, no_split=True)

    @property
    def free_nbytes(self) -> int:
        segments: list[dict[str, int]] = self.native.snapshot(include_traces=False)
        return sum(segment["total_size"] - segment["active_size"] for segment in segments)

    def allocating(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self.native, self._device)


class NcclCommunicator(Backend):
    """The ranks along one axis, over a NCCL group, which the transport closes."""

    compares_calls = False

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup,
        host: GlooCommunicator,
        failures: FailureReports,
        first_error: FirstError,
    ) -> None:
        super().__init__(axis, host.rank, host.size)
        self._group: dist.ProcessGroup | None = group
        self._host = host
        self._failures = failures
        self._first_error = first_error
        self._factors: dict[tuple[float, torch.device], torch.Tensor] = {}
        self._registered: list[tuple[weakref.ref[MemoryPool], Any]] = []  # and the backend that knows it
        self._has_symmetric_memory = False

    @property
    def scratch_nbytes(self) -> int:
        return self._host.scratch_nbytes

    def new_pool(self, device: torch.device, *, is_symmetric: bool) -> MemoryPool:
        backend, accelerator = cast(Any, self._group)._get_backend(device), simulation()
        pool: MemoryPool
        try:
            pool = NcclPool(device, backend.mem_allocator) if accelerator is None else accelerator.pool()
            # Segments that are made later are registered as well.
            backend.register_mem_pool(pool.native, **({"symm": True} if is_symmetric else {}))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise CommError(
                f"torch {torch.__version__} cannot register memory with NCCL on axis {self.axis!r}: {error}.",
                do='set "zero_optimization": {"nccl_ub": false}, or true in place of "symmetric".',
                code="nccl-memory",
            ) from error
        self._registered.append((weakref.ref(pool), backend))
        return pool

    def open_symmetric_memory(self, device: torch.device) -> bool:
        """Allocate memory that torch's products over symmetric memory use, and that they enlarge where they need more.

        Raises: CommError: the ranks are on several nodes, or torch or a device cannot; the same on every rank.
        Communicates: between the hosts what they are and what is wrong; then torch exchanges handles through the store.
        """
        name = cast(Any, self._group).group_name
        nodes, indices = zip(*self.gather_objects([node(), device.index], label=_OPENS), strict=True)
        problems: Sequence[str] = []
        if len(set(nodes)) > 1:
            raise symmetric_memory_error(self.axis, f"its ranks are on {len(set(nodes))} nodes")
        if len(set(indices)) < self.size:
            problems = [
                f"its ranks name their devices {', '.join(map(str, indices))}, and torch needs different numbers"
            ]
        for part in (_check_symmetric_memory, _open_symmetric_memory):
            if not any(problems):  # of all ranks, so that none waits in the second part for one that has failed
                problem = ""
                try:
                    part(name, device, indices)
                except (AssertionError, AttributeError, ImportError, RuntimeError) as error:
                    problem = f"on rank {self.rank} of the axis: {error}"
                problems = self.gather_objects(problem, label=_OPENS)
        if any(problems):
            raise symmetric_memory_error(self.axis, next(filter(None, problems)))
        self._has_symmetric_memory = True
        return True

    def issue(self, call: Call) -> Work:
        if is_in_host_memory(call.sent):
            return self._host.issue(call)
        if self._group is None:  # torch would take its default group
            self._first_error.check()
            raise closed_error(self.axis, call.verb, call.label)
        what = f"{call.verb} {call.label!r} on axis {self.axis!r}, over NCCL,"
        with self.explained(what):
            if call.operator is not None:
                return FinishedWork(call.operator(self._group.group_name))
            return self._on_stream(call, what)

    def _on_stream(self, call: Call, what: str) -> NcclWork:
        result, sent, group = call.result, call.sent, self._group
        landing: torch.Tensor | None = None
        factor: torch.Tensor | None = None
        match call.verb:
            case "all_gather":
                work = _all_gather(result, sent, group=group, async_op=True)
            case "exchange":
                work = _all_gather(result.view(-1), sent.detach().clone(), group=group, async_op=True)
            case "reduce_scatter":
                # NCCL reduces in place into the own range; elsewhere it writes to the result, or to a tensor of its
                # own that is added to the result.
                own = own_range(sent, self.rank, self.size)
                target = result
                if call.accumulate or result.dtype != sent.dtype:
                    target = landing = torch.empty_like(own)
                elif is_same_memory(own, result):
                    target = own
                operation, factor = self._reduction(call.scale, sent)
                work = _reduce_scatter(target, sent, operation, group=group, async_op=True)
            case "all_reduce":
                operation, factor = self._reduction(call.scale, result)
                work = dist.all_reduce(result, operation, group=group, async_op=True)
            case "all_to_all":
                outs, ins = (None if each is None else list(each) for each in (call.out_splits, call.source_splits))
                work = dist.all_to_all_single(result, sent, outs, ins, group=group, async_op=True)
            case "send" | "recv" | "batch":
                # A message outside of a batch would bring a warning, and, in a group that torch connects late, use
                # another communicator than one in a batch of the peer.
                with _coalescing(group, result.device, async_ops=True) as work:
                    for one in call.messages or (call,):
                        if one.verb == "send":
                            dist.isend(one.result, group=group, group_dst=one.peer)
                        else:
                            dist.irecv(one.result, group=group, group_src=one.peer)
            case _:
                work = dist.broadcast(result, group=group, group_src=call.peer, async_op=True)
        return NcclWork(self, what, work, result, landing, factor, call.accumulate)

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return self._host.gather_objects(value, label=label)

    def barrier(self, *, label: str) -> None:
        self._host.barrier(label=label)

    def drain(self) -> None:
        self._host.drain()

    def check(self) -> None:
        self._first_error.check()

    def close(self) -> None:
        self._host.close()
        group, self._group = self._group, None
        registered, self._registered = self._registered, []
        if group is not None and self._first_error.error is None:  # to abort a group did it
            for reference, backend in registered:
                if (pool := reference()) is not None:
                    # The script may have destroyed the group: torch forgets the pool first, and raises then. Of a pool
                    # that it knew, memory that is freed later would end the process.
                    with suppress(RuntimeError):
                        backend.deregister_mem_pool(pool.native)
            if self._has_symmetric_memory:
                _symmetric_memory()._group_name_to_workspace_tensor.pop(group.group_name, None)
        self._factors.clear()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn NCCL's error inside the block into the failure that caused it."""
        self._first_error.check()
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            # An aborted group raises what NCCL says; the reason is the failure that the watch has found.
            self._first_error.check()
            if not isinstance(error, dist.DistError):
                raise
            cause = self._failures.explain(error, what)
            self._first_error.keep(cause)
            raise cause from error

    def _reduction(self, scale: float, full: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        """NCCL's reduction of ``full``, and the factor after it, which exists when NCCL begins."""
        before, after = split_scale(scale, full.dtype, self.size, is_registered=bool(self._registered))
        return _operation(before, self.size), self._factor(after, full)

    def _factor(self, after: float, full: torch.Tensor) -> torch.Tensor | None:
        """``after`` as a tensor of one element: unlike a number it makes a 16-bit product an fp32 one."""
        if after == 1.0:
            return None
        factor = self._factors.get((after, full.device))
        if factor is None:
            factor = torch.full((1,), after, dtype=torch.float32, device=full.device)
            self._factors[after, full.device] = factor
        return factor


def _symmetric_memory() -> Any:
    """torch's module, which registers its operators."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def _check_symmetric_memory(group: str, device: torch.device, indices: Sequence[int]) -> None:
    """Raises: AttributeError, ImportError: torch has no such operators. RuntimeError: a device is out of reach."""
    _symmetric_memory()
    _ = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    for peer in indices:
        if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
            raise RuntimeError(f"GPU {device.index} has no access to the memory of GPU {peer}")


def _open_symmetric_memory(group: str, device: torch.device, indices: Sequence[int]) -> None:
    """Raises: RuntimeError: CUDA cannot allocate such memory, or share it between the processes."""
    _symmetric_memory().get_symm_mem_workspace(group, min_size=_LEAST_WORKSPACE)


class ComparedCommunicator(Communicator):
    """The ranks of another communicator, whose backend does not compare calls in device memory.

    Raises: CommError: the ranks issue different collectives (on all of them, before one begins), or the sender of a
        message another than its receiver (in the receiver's ``wait()``).
    Communicates: between the hosts: before each collective an exchange of 168 bytes and 16 for each rank; with each
        message as much.
    Order: a collective blocks the host until all ranks have issued it; ``wait()`` of a receive until its sender has.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.backend, comm.recorder)
        self._num_compared = 0
        self._format = struct.Struct(f"<{_TEXT_BYTES}sq{2 * self.size}q")  # text, its checksum, source and out splits

    def begin(self, call: Call) -> Work:
        if is_in_host_memory(call.sent):
            return super().begin(call)
        if call.verb not in ("send", "recv", "batch"):
            self._compare(call)
            return super().begin(call)
        receives = []
        for message in call.messages or (call,):
            mine = self._memory(self._described(message))
            theirs = mine if message.verb == "send" else self._memory(bytes(self._format.size))
            work = self.backend.issue(Call(message.verb, _LABEL, theirs, peer=message.peer))
            if message.verb == "send":
                work.wait()
            else:
                receives.append((message.peer, mine, work))

        def compare(begun: Work) -> Work:
            for peer, mine, work in receives:
                self._check(" about a message", [self.rank, peer], bytes(mine.numpy()) + bytes(work.wait().numpy()))
            return begun

        return StagedWork(None, partial(super().begin, call), compare)

    def _compare(self, call: Call) -> None:
        vector, rows = (self._memory(self._described(call) * count) for count in (1, self.size))
        exchange = exchange_of(vector, self.size, _LABEL)._replace(result=rows.view(self.size, -1))
        about = f" about call {self._num_compared}"
        self._num_compared += 1
        splits = self._check(about, range(self.size), bytes(self.backend.issue(exchange).wait().numpy()))
        for peer, of_peer in enumerate(splits):
            for rank, of_rank in enumerate(splits):
                if (sent := of_peer[rank]) != (expected := of_rank[self.size + peer]):
                    raise split_mismatch(self.axis, call.label, rank, peer, sent, expected)

    def _described(self, call: Call) -> bytes:
        numel = max(call.sent.numel(), call.result.numel())
        if call.verb == "exchange":
            numel = call.sent.numel()
        elif call.out_splits is not None:
            numel = 0  # ranks send different numbers of elements
        verb, root = "send" if call.verb == "recv" else call.verb, call.peer if call.verb == "broadcast" else -1
        text = str(GroupCall(verb, call.label, numel, call.sent.dtype, root)).encode()
        none = [0] * self.size
        return self._format.pack(text, zlib.crc32(text), *(call.source_splits or none), *(call.out_splits or none))

    def _memory(self, content: bytes) -> torch.Tensor:
        return host_memory(torch.frombuffer(bytearray(content), dtype=torch.uint8), is_pinned=False)

    def _check(self, about: str, ranks: Sequence[int], described: bytes) -> list[tuple[int, ...]]:
        """Compare what ``_described`` says on ``ranks``. Returns: the split sizes of each.

        Raises: CommError: the calls differ.
        """
        calls: dict[tuple[bytes, int], list[int]] = {}
        splits = []
        for rank, (text, checksum, *sizes) in zip(ranks, self._format.iter_unpack(described), strict=True):
            calls.setdefault((text, checksum), []).append(rank)
            splits.append(tuple(sizes))
        if len(calls) > 1:
            texts = [(of, text.rstrip(b"\0").decode(errors="replace")) for (text, _), of in calls.items()]
            raise calls_differ(self.axis, about, *texts)
        return splits
