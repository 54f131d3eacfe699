"""A simulated accelerator: it computes on the CPU at once, and keeps who waits for whom as on CUDA.

Every operator runs on the current stream of the thread that calls it, a copy without ``non_blocking`` or from pageable
memory blocks the host, ``item()`` does too. The memory of tensors is the device's, unless Shoal allocated it for the
host. Allocator: what is freed may be used again by the next allocation, of any size, of the stream that allocated it,
in the same pool. So to allocate counts as a write of that stream, and it must know that all other streams are done with
what was freed before, unless they were named by ``record_stream``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from shoal.comm.fake import FakeStageCommunicator
from shoal.comm.protocol import Backend
from shoal.kernels.use import this_kernel
from shoal.simulation.accesses import (
    Access,
    FreedBytes,
    StreamFinding,
    TrackedStorage,
    bytes_of,
    place_of_call,
    race,
    reused,
)
from shoal.simulation.clocks import BackwardStreams, Clock, SimulatedEvent, SimulatedStream, running_node
from shoal.simulation.collectives import SimulatedCommunicator, SimulatedStageCommunicator
from shoal.simulation.fusion import Fusion, is_fusible
from shoal.simulation.issue_order import IssuedOn, IssueOrder, Issues
from shoal.simulation.kernels import is_product, lacks_formula
from shoal.simulation.memory import ACTIVATION, GATHERED, NCCL, WORKSPACE, DeviceMemory
from shoal.simulation.modes import accessed, effects_of, needs_values, parts_of_memory, tensors_of, watching
from shoal.simulation.nccl_memory import communicator_nbytes
from shoal.simulation.times import COMPUTE, Cost, StreamTimes
from shoal.streams import called, simulated

T = TypeVar("T")

_ALLOCATIONS = ("aten.empty", "aten.new_empty")
_READ_IN_PART = ("aten.embedding.", "aten.gather.", "aten.index", "aten.nll_loss_forward.", "aten.nll_loss_backward.")
_MASK = "aten.bernoulli_.float"  # draws what a dropout keeps, on a GPU a byte for each element
_DEATHS_EVERY = 4096  # operations, where orders are not what is asked for


class _Thread(threading.local):
    def __init__(self) -> None:
        self.host: SimulatedStream | None = None
        self.entered: list[tuple[SimulatedStream, object]] = []  # each with the node of autograd that entered it
        self.backward = BackwardStreams()
        self.num_pauses = 0
        self.kind = ACTIVATION  # of what is allocated
        self.pool: SimulatedPool | None = None  # in which it is


class SimulatedPool:
    """Segments of their own: see ``shoal.streams.MemoryPool``."""

    def __init__(self, thread: _Thread, memory: DeviceMemory | None) -> None:
        self._thread, self._memory = thread, memory

    @property
    def native(self) -> SimulatedPool:
        return self

    @property
    def free_nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.allocator.free_nbytes(self)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        before, self._thread.pool = self._thread.pool, self
        try:
            yield
        finally:
            self._thread.pool = before


class SimulatedAccelerator:
    """The accelerator of one rank. Made by the thread that runs the rank.

    Args:
        times: gives operations durations; the host's threads are then simulated in turn. None: only orders count.
        memory: records each allocation; None: they are not recorded.
        is_fused: operators that follow each other are one kernel (see ``fusion``).

    Attributes: ``findings``: by what was reported. ``num_operations``: that were checked. ``host_reads``: by line of
    Python, how often the rank's thread waited for values. ``without_formula``: operators on the device that take flops,
    and nothing says how many.
    """

    def __init__(
        self, times: StreamTimes | None = None, memory: DeviceMemory | None = None, *, is_fused: bool = False
    ) -> None:
        self.times = times
        self._is_fused = is_fused
        self._fusion: Fusion | None = None
        self._fused_last: Access | None = None
        self._memory_of_device = memory
        self.findings: dict[object, StreamFinding] = {}
        self.num_operations = 0
        self.host_reads: Counter[str] = Counter()
        self.without_formula: set[str] = set()
        self._next_deaths = 0
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._storages: dict[int, TrackedStorage] = {}
        self._died: deque[int] = deque()  # keys of the former, which any thread adds
        self._streams: list[SimulatedStream] = []
        self._order: IssueOrder | None = None
        self._issued: IssuedOn = {}
        # Since the last allocation there, by the stream and the pool that it was allocated in.
        self._freed: dict[tuple[SimulatedStream, object], list[FreedBytes]] = {}
        self.compute = self._new_stream("the compute stream")
        self._main = threading.get_ident()
        self._main_host = self.host
        self._host_threads: dict[str, SimulatedStream] = {}
        self._connected: dict[tuple[tuple[int, ...], int], set[str]] = {}  # operations of the communicators of ranks

    @property
    def host_nbytes(self) -> int | None:
        return None if self.times is None else self.times.machine.host_nbytes

    @property
    def is_timed_gpu(self) -> bool:
        return self.times is not None and not self.is_cpu

    def multiplies_blocks(self, width: int) -> bool:
        return self.times is None or width in self.times.machine.scaled_blocks

    @property
    def multiplies_groups(self) -> bool:
        return self.times is not None and self.times.machine.multiplies_groups

    @property
    def is_cpu(self) -> bool:
        return self.times is not None and self.times.machine.is_cpu

    # streams: see ``shoal.streams``

    def _new_stream(self, name: str) -> SimulatedStream:
        with self._lock:
            made = SimulatedStream(name, self._before_edge, self._launch, self._enter)
            self._streams.append(made)
        return made

    def _launch(self, stream: SimulatedStream) -> None:
        stream.join(self.host.clock)

    def _enter(self, stream: SimulatedStream | None) -> None:
        if self.times is None:
            self._thread.backward.note(self.current())
            self.current()  # a node that runs is one of what is around the block
        if stream is None:
            self._thread.entered.pop()
        else:
            self._thread.entered.append((stream, running_node()))
        if self.times is None:
            self._thread.backward.note(self.current())

    @property
    def host(self) -> SimulatedStream:
        """This thread."""
        if self._thread.host is None:
            is_main = threading.get_ident() == self._main
            self._thread.host = self._new_stream(
                "the host" if is_main else f"the host's thread {threading.current_thread().name}"
            )
        return self._thread.host

    def stream(self) -> SimulatedStream:
        number = sum(stream.name.startswith("copy stream") for stream in self._streams)
        return self._new_stream(f"copy stream {number}")

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self._before_edge, lambda: self.host)

    def current(self) -> SimulatedStream:
        stream, entered_in = self._thread.entered[-1] if self._thread.entered else (self.compute, None)
        return stream if self.times is not None else self._thread.backward.current(stream, entered_in)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        with self._lock:
            self._storage_of(tensor).recorded.add(stream)

    def pool(self) -> SimulatedPool:
        return SimulatedPool(self._thread, self._memory_of_device)

    def note_cuda_graphs(self) -> None:
        if self._memory_of_device is not None:
            self._memory_of_device.has_cuda_graphs = True

    def _before_edge(self) -> None:
        self.current()  # what autograd orders comes first
        self.end_kernel()
        self.notice_deaths()

    def end_kernel(self) -> None:
        """What was fused until now is one kernel."""
        fusion, self._fusion = self._fusion, None
        if fusion is not None and self.times is not None:
            self.times.add(fusion.stream, "fused", self.times.kernel_cost(fusion.kernel()))
            if self._memory_of_device is not None and self._fused_last is not None:
                self._note_allocations(self._memory_of_device, fusion.outliving(), self._fused_last)

    def synchronize(self) -> None:
        self._before_edge()
        for stream in self._streams:
            if not stream.name.startswith("the host"):
                self.host.wait_clock(stream.clock)

    def communicator(
        self, backend: Backend, ranks: tuple[int, ...], shared: dict[str, Any] | None, number: int
    ) -> SimulatedCommunicator:
        """``backend`` with collectives on a stream of its own.

        Args:
            ranks: those along its axis.
            shared: by ranks that are threads; None: the order in which ranks issue collectives is not checked.
            number: see ``World.communicator``.
        """
        if isinstance(backend, FakeStageCommunicator) and self.times is not None:
            return SimulatedStageCommunicator(backend, self, ranks, self.times, self._new_stream, number)
        stream = self._new_stream(f"the stream of collectives on {backend.axis!r}")
        if shared is not None:
            self._order = shared.setdefault("issue order", IssueOrder())
        issues = None if self._order is None else Issues(self._order, self._issued, stream, ranks, backend.rank, number)
        return SimulatedCommunicator(backend, self, stream, ranks, issues, number)

    def num_nodes(self, ranks: Sequence[int]) -> int:
        """Of a dry run's machine that have these ranks; 1 where no machine is simulated."""
        return 1 if self.times is None else len({rank // self.times.machine.gpus_per_node for rank in ranks})

    def connect(self, communicator: SimulatedCommunicator, op: str) -> None:
        """A communicator is used for ``op``: NCCL allocates the buffers that its ranks need for that."""
        ranks = communicator.ranks
        ops = self._connected.setdefault((ranks, communicator.number), set())
        if self.times is None or self._memory_of_device is None or self.is_cpu or op in ops:
            return
        node, before = self.times.machine, set(ops)
        ops.add(op)
        num_channels = min(communicator.max_ctas or node.links.num_channels, node.links.num_channels)
        after, earlier = (communicator_nbytes(each, ranks, node.gpus_per_node, num_channels) for each in (ops, before))
        self._memory_of_device.add_outside(f"{NCCL}, {communicator.axis}", after - earlier)

    def check_order(self) -> None:
        """Report collectives of all ranks that wait for each other in a circle."""
        if self._order is not None and (circle := self._order.circle()):
            text = "collectives deadlock, each waiting for the next, which hangs on NCCL:" + "".join(circle)
            self._report(("circle",), lambda: text)

    def carried(self, run: Callable[[], T], thread: str) -> tuple[Callable[[], T], Callable[[], None]]:
        if self.times is not None:
            return self._carried_out(run, thread)
        started = self.host.clock.copy()
        ended = Clock()

        def inside() -> T:
            self.host.join(started)
            with simulated(self), watching(self):
                try:
                    return run()
                finally:
                    ended.join(self.host.clock)

        return inside, lambda: self.host.wait_clock(ended)

    def _carried_out(self, run: Callable[[], T], thread: str) -> tuple[Callable[[], T], Callable[[], None]]:
        """Call ``run()`` now, as if ``thread`` did, after what it has done before."""
        own = self.host
        if thread not in self._host_threads:
            self._host_threads[thread] = self._new_stream(f"the host's thread {thread}")
        other = self._host_threads[thread]
        other.join(own.clock)
        self._thread.host = other
        try:
            result = called(run)
        finally:
            self._thread.host = own
        ended = other.clock.copy()
        return result, lambda: self.host.join(ended)

    def host_mark(self) -> Callable[[], None]:
        reached = self.host.clock.copy()
        return lambda: self.host.wait_clock(reached)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block operators of this thread are the simulation's own."""
        self._thread.num_pauses += 1
        try:
            yield
        finally:
            self._thread.num_pauses -= 1

    @property
    def is_paused(self) -> bool:
        return self._thread.num_pauses > 0

    # memory

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        self.end_kernel()
        before, self._thread.kind = self._thread.kind, WORKSPACE
        try:
            yield
            self.end_kernel()
        finally:
            self._thread.kind = before

    def _storage_of(self, tensor: torch.Tensor, *, is_host: bool | None = False) -> TrackedStorage:
        """The storage's accesses; one that was not seen before is ``is_host`` (on another thread always)."""
        storage = tensor.untyped_storage()
        tracked = self._storages.get(storage._cdata)
        if tracked is None or tracked.ref.expired():
            if self.is_cpu:
                is_host = False
            elif self.host is not self._main_host:
                is_host = True
            elif not tensor.dim() and not is_host:
                is_host = None
            tracked = self._track(storage, is_host=is_host)
        return tracked

    def _track(self, storage: torch.UntypedStorage, *, is_host: bool | None) -> TrackedStorage:
        made = TrackedStorage(storage, is_host=is_host, at_death=self._died.append)
        self._storages[storage._cdata] = made
        return made

    def is_host(self, tensor: torch.Tensor) -> bool:
        with self._lock:
            return self._storage_of(tensor).is_host is True

    def add_host_memory(self, tensor: torch.Tensor, *, is_pinned: bool) -> None:
        if self.is_cpu:
            return
        with self._lock:
            tracked = self._storage_of(tensor, is_host=True)
            tracked.is_host, tracked.is_pinned, tracked.stream = True, is_pinned, None
            tracked.forget()
            if self._memory_of_device is not None:
                self._memory_of_device.free(tensor.untyped_storage()._cdata)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self._lock:
            self.notice_deaths()
            tracked = self._storages.get(storage._cdata)
            if tracked is None:
                tracked = self._track(storage, is_host=False)
            if tracked.nbytes == nbytes:
                return
            self._free(tracked, "its storage was resized")
            tracked.forget()
            tracked.nbytes = nbytes
            access = None
            if nbytes:
                tracked.stream, tracked.pool = self.current(), self._thread.pool
                self._allocate(tracked.stream)
                access = self._access("allocation", tracked.stream)
                self._touch_storage(tracked, 0, nbytes, access, is_write=True)
            if self._memory_of_device is not None:
                self._memory_of_device.allocate(storage, nbytes, tracked.stream, GATHERED, tracked.pool)
                if access is not None:
                    self._memory_of_device.note_peak(access.name, access.place)

    def notice_deaths(self) -> None:
        """Check storages that were freed since the last operation."""
        if self.times is not None and self.num_operations < self._next_deaths:
            return
        self._next_deaths = self.num_operations + _DEATHS_EVERY
        with self._lock:
            while self._died:
                key = self._died.popleft()
                if (tracked := self._storages.get(key)) is not None and tracked.ref.expired():
                    self._free(self._storages.pop(key), "the last tensor of it is gone")

    def _free(self, tracked: TrackedStorage, how: str) -> None:
        if tracked.is_host is not False:
            return  # a kernel has the value; page-locked memory is given back after its copies, other copies block
        stream = tracked.stream if tracked.stream is not None else self.compute
        clock = stream.clock.copy()
        clock.join(self.host.clock)
        for each in tracked.recorded:  # the allocator waits for an event of now on each
            clock.join(each.clock)
        freed = [
            FreedBytes(self._named(tracked), start, stop, access, was_write, how, place_of_call())
            for access, was_write, start, stop in tracked.unordered(clock)
        ]
        if freed:
            self._freed.setdefault((stream, tracked.pool), []).extend(freed)

    def _allocate(self, stream: SimulatedStream) -> None:
        """Check that memory that was freed may be used again on ``stream``."""
        stream.join(self.host.clock)
        for freed in self._freed.pop((stream, self._thread.pool), ()):
            if not freed.access.is_before(stream.clock):
                key = ("freed", freed.access.name, freed.access.place, stream)
                self._report(key, partial(reused, freed, stream.name, place_of_call()))

    def label(self, tensor: torch.Tensor, name: str, kind: str = "", *, is_weak: bool = False) -> None:
        """Name the memory. ``is_weak``: unless it has a name."""
        if kind:
            self.end_kernel()  # which allocates what it made
        with self._lock:
            tracked = self._storage_of(tensor)
            tracked.name = tracked.name if is_weak and tracked.name else name
            if kind and self._memory_of_device is not None:
                self._memory_of_device.set_kind(tensor.untyped_storage(), kind)

    @staticmethod
    def _named(tracked: TrackedStorage) -> str:
        return tracked.name or f"a tensor of {tracked.nbytes} bytes"

    # operations

    def _access(self, name: str, stream: SimulatedStream) -> Access:
        stream.join(self.host.clock)
        self.num_operations += 1
        return Access(stream, stream.tick(), name, place_of_call())

    def run(
        self,
        name: str,
        stream: SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        cost: Callable[[StreamTimes], Cost] | None = None,
    ) -> Access:
        """An operation that is queued on ``stream`` now."""
        self.end_kernel()
        with self._lock:
            if self.times is not None and stream is not self.host and not name.startswith(_ALLOCATIONS):
                self.times.add(self.host, "launch", self.times.launch())
            access = self._access(name, stream)
            if self.times is not None and cost is not None:
                self.times.add(stream, name, cost(self.times))
                if self.is_cpu:
                    self.host.join(stream.clock)
            written = {id(tensor) for tensor in writes}
            for tensor in reads:
                if id(tensor) not in written:
                    self._touch(tensor, access, is_write=False)
            for tensor in writes:
                self._touch(tensor, access, is_write=True)
            return access

    def _touch(self, tensor: torch.Tensor, access: Access, *, is_write: bool) -> None:
        start, stop = bytes_of(tensor)
        if start != stop:
            self._touch_storage(self._storage_of(tensor), start, stop, access, is_write=is_write)

    def _touch_storage(self, tracked: TrackedStorage, start: int, stop: int, access: Access, *, is_write: bool) -> None:
        for old, was_write, begin, end in tracked.conflicts(
            start, stop, access, access.stream.clock, is_write=is_write
        ):
            key = (old.name, old.place, access.name, access.place)
            self._report(key, partial(race, self._named(tracked), begin, end, old, was_write, access, is_write))

    def operator(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator of torch has run."""
        name = str(operator)
        effects = effects_of(operator)
        if effects.unknown:
            self.unknown(name, effects.unknown)
        reads, writes = accessed(effects, args, kwargs)
        reads, writes = self._memory(name, reads), self._memory(name, writes)
        given = list(tensors_of([*args, *kwargs.values()]))
        with self._lock:
            made = [t for t in self._memory(name, list(tensors_of(result))) if self._is_new(t, given)]
            touched = [(tensor, self._storage_of(tensor)) for tensor in (*reads, *writes)]
            is_on_host = self._is_host_work(touched, made)
            # A number that was made of nothing is of no stream until it is used.
            is_scalar = not touched and bool(made) and not any(tensor.dim() for tensor in made)
            stream = self.host if is_on_host or is_scalar else self.current()
            for tensor in made:
                kind = None if is_scalar else is_on_host
                storage = self._storage_of(tensor, is_host=kind)
                storage.is_host, storage.stream = kind, stream if kind is False else None
                storage.pool = self._thread.pool
            if not is_on_host:
                for tensor in writes:
                    storage = self._storage_of(tensor)
                    if storage.is_host is None:
                        storage.is_host, storage.stream = False, stream
                reads = [tensor for tensor in reads if self._storage_of(tensor).is_host is not None]
            if not is_on_host and not is_scalar and made:
                self._allocate(stream)
            if reads or writes or made:
                if self.times is not None and not is_on_host and lacks_formula(operator):
                    self.without_formula.add(name)
                if self._joins_kernel(operator, stream):
                    is_read = reads if effects.overwrites else [*reads, *writes]
                    access = self._fuse(name, stream, is_read, writes, made)
                else:
                    cost = partial(self._cost, operator, args, kwargs, result, reads, writes, made)
                    access = self.run(name, stream, reads, [*writes, *made], cost)
                if made and self._memory_of_device is not None and not is_on_host and not is_scalar:
                    if self.times is not None and is_product(operator):
                        self._memory_of_device.add_workspace(stream, self.times.machine.workspace_nbytes)
                    if self._fusion is not None:
                        self._fusion.allocate(made)
                        self._fused_last = access
                    else:
                        storages = [tensor.untyped_storage() for tensor in made]
                        self._note_allocations(self._memory_of_device, storages, access)
                if name == _MASK and self._memory_of_device is not None and not is_on_host and not self.is_cpu:
                    for mask in writes:
                        self._memory_of_device.allocate(mask.untyped_storage(), mask.numel(), stream, ACTIVATION)
            waits = needs_values(operator, effects, args, kwargs) or self._blocks(operator, touched, args, kwargs)
            if waits and not is_on_host:
                self.notice_deaths()
                self._block_host(stream)

    def _joins_kernel(self, operator: Any, stream: SimulatedStream) -> bool:
        """True if the operator is a part of a kernel: of Shoal's, or of one that a compiler would make."""
        if self.times is None:
            return False
        return this_kernel() is not None or (self._is_fused and stream is self.compute and is_fusible(operator))

    def _fuse(
        self,
        name: str,
        stream: SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> Access:
        """An operator is a part of the kernel under way, or begins one. ``reads``: also what it changes in place."""
        if self._fusion is not None and not self._fusion.goes_on(stream, this_kernel()):
            self.end_kernel()
        if self._fusion is None:
            assert self.times is not None
            self.times.add(self.host, "launch", self.times.launch())
            self._fusion = Fusion(stream, this_kernel())
        self._fusion.add(reads, writes, made)
        return self._access(name, stream)

    def _note_allocations(self, memory: DeviceMemory, made: Sequence[torch.UntypedStorage], access: Access) -> None:
        for storage in {each._cdata: each for each in made}.values():
            memory.allocate(storage, storage.nbytes(), access.stream, self._thread.kind, self._thread.pool)
        memory.note_peak(access.name, access.place)

    def _cost(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        times: StreamTimes,
    ) -> Cost:
        """Of an operator of torch: host work, a copy over the bus, or a kernel."""
        name = str(operator)
        if name.startswith(_ALLOCATIONS):
            return Cost(COMPUTE, 0.0)
        touched = [self._storage_of(tensor) for tensor in (*reads, *writes, *made)]
        if all(storage.is_host is not False for storage in touched):
            return self._host_cost(reads, [*writes, *made], times)
        on_host = [storage for storage in touched if storage.is_host]
        if on_host and name.startswith(("aten.copy_", "aten._to_copy")):
            written = [*writes, *made]
            is_to_host = any(self.is_host(tensor) for tensor in written)
            is_pinned = all(storage.is_pinned for storage in on_host)
            return times.copy(_nbytes(written), is_to_host=is_to_host, is_pinned=is_pinned)
        factor = 1 if effects_of(operator).overwrites else 2
        nbytes_read, nbytes_written = _nbytes(reads), factor * _nbytes(writes) + _nbytes(made)
        if name.startswith(_READ_IN_PART):
            nbytes_read = min(nbytes_read, nbytes_written)
        return times.kernel(operator, args, kwargs, result, nbytes_read + nbytes_written)

    def _host_cost(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], times: StreamTimes) -> Cost:
        nbytes = _nbytes(reads) + 2 * _nbytes(writes)  # a cache line is read before it is written
        return times.on_host(nbytes, is_main=self.host is self._main_host)

    def _is_host_work(
        self, touched: Sequence[tuple[torch.Tensor, TrackedStorage]], made: Sequence[torch.Tensor]
    ) -> bool:
        if self.is_cpu:
            return False
        if self.host is self._main_host and not any(storage.is_host for _, storage in touched):
            # Of numbers that are not in host memory a kernel makes a vector; what remains a number stays on the host.
            return bool(touched) and all(each.is_host is None for _, each in touched) and not any(t.dim() for t in made)
        return all(storage.is_host is not False for _, storage in touched)

    @staticmethod
    def _blocks(
        operator: Any,
        touched: Sequence[tuple[torch.Tensor, TrackedStorage]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """True if the host waits for an operation between its memory and the device's."""
        on_host = [storage for _, storage in touched if storage.is_host]
        if not on_host:
            return False
        if not str(operator).startswith("aten.copy_") or not all(each.is_pinned for each in on_host):
            return True
        return not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))

    def _is_new(self, tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
        key = tensor.untyped_storage()._cdata
        known = self._storages.get(key)
        if (known is not None and not known.ref.expired()) or tensor.device.type != "cpu":
            return False
        return all(other.layout is not torch.strided or other.untyped_storage()._cdata != key for other in given)

    def _memory(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The dense tensors of CPU memory in these; others are reported. Those of ``meta`` have no memory."""
        dense: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.device.type == "meta":
                continue
            if tensor.device.type != "cpu":
                self.unknown(name, f"a tensor is on {tensor.device}, and the simulated accelerator is the CPU")
                continue
            try:
                dense += parts_of_memory(tensor)
            except TypeError as error:
                self.unknown(name, f"the memory of a tensor with layout {error} is not known")
        return dense

    def host_access(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        self.notice_deaths()
        self.run(name, self.host, reads, writes, partial(self._host_cost, reads, writes))

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """The host reads a tensor's values, wherever it lies. Order: blocks the host."""
        with self._lock:
            self.notice_deaths()
            is_on_host = self._storage_of(tensor).is_host is not False
            stream = self.host if is_on_host else self.current()

            def cost(times: StreamTimes) -> Cost:
                return times.copy(tensor.nbytes, is_to_host=True, is_pinned=True)

            self.run("a read of values", stream, [tensor], [], None if is_on_host else cost)
            if not is_on_host:
                self._block_host(stream)

    def _block_host(self, stream: SimulatedStream) -> None:
        """The host waits until it has values of a stream of the device."""
        if self.host is self._main_host:
            self.host_reads[place_of_call()] += 1
        self.host.join(stream.clock)

    def transfer(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Callable[[], None]:
        self.notice_deaths()
        stream = SimulatedStream("the disk", self.notice_deaths, self._launch, self._enter)
        self.run(name, stream, reads, writes, lambda times: times.disk(_nbytes([*reads, *writes])))
        return lambda: self.host.wait_clock(stream.clock)

    # findings

    def unknown(self, name: str, why: str) -> None:
        """An operation cannot be checked."""
        text = f"{name} cannot be checked: {why}.\n  at:      {place_of_call()}"
        self._report(("unknown", name, why), lambda: text)

    def _report(self, key: object, text: Callable[[], str]) -> None:
        with self._lock:
            finding = self.findings.get(key)
            if finding is None:
                self.findings[key] = StreamFinding(text())
            else:
                finding.count += 1


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
