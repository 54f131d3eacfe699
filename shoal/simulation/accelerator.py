"""A simulated accelerator: it computes on the CPU at once, and keeps who waits for whom as on CUDA.

Every operator runs on the current stream of the thread that calls it, a copy without ``non_blocking`` or from pageable
memory blocks the host, ``item()`` does too. The memory of tensors is the device's, unless Shoal allocated it for the
host. Allocator: what is freed may be used again at once by the stream that allocated it. So to allocate counts as a
write of that stream, and to free needs that all other streams are done, or were named by ``record_stream``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar

import torch

from shoal.comm.protocol import Backend
from shoal.device import is_fake
from shoal.simulation.accesses import Access, TrackedStorage, bytes_of
from shoal.simulation.clocks import Clock, SimulatedEvent, SimulatedStream
from shoal.simulation.collectives import SimulatedCommunicator
from shoal.simulation.effects import accessed, effects_of, parts_of_memory, tensors_of
from shoal.simulation.findings import StreamFinding, freed, race
from shoal.simulation.modes import watching
from shoal.streams import simulated

T = TypeVar("T")

_SKIPPED = (
    "/torch/",
    "/contextlib.py",
    "/threading.py",
    "/concurrent/",
    "/shoal/simulation/",
    "/shoal/streams.py",
    "/shoal/comm/",
    "/shoal/memory/",
    "/shoal/zero/parameter_access.py",
)
_NUM_PLACES = 3


class _Thread(threading.local):
    def __init__(self) -> None:
        self.host: SimulatedStream | None = None
        self.entered: list[SimulatedStream] = []
        self.num_pauses = 0


class SimulatedAccelerator:
    """The accelerator of one rank. Made by the thread that runs the rank.

    Attributes: ``findings``: by what was reported. ``num_operations``: that were checked.
    """

    def __init__(self) -> None:
        self.findings: dict[object, StreamFinding] = {}
        self.num_operations = 0
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._storages: dict[int, TrackedStorage] = {}
        self._streams: list[SimulatedStream] = []
        self._compute = self._new_stream("the compute stream")
        self._main = threading.get_ident()

    # streams: see ``shoal.streams``

    def _new_stream(self, name: str) -> SimulatedStream:
        with self._lock:
            made = SimulatedStream(name, self.notice_deaths, self._launch, self._enter)
            self._streams.append(made)
        return made

    def _launch(self, stream: SimulatedStream) -> None:
        stream.join(self.host.clock)

    def _enter(self, stream: SimulatedStream | None) -> None:
        if stream is None:
            self._thread.entered.pop()
        else:
            self._thread.entered.append(stream)

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
        return SimulatedEvent(self.notice_deaths, lambda: self.host)

    def current(self) -> SimulatedStream:
        return self._thread.entered[-1] if self._thread.entered else self._compute

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        with self._lock:
            self._storage_of(tensor).recorded.add(stream)

    def synchronize(self) -> None:
        self.notice_deaths()
        for stream in self._streams:
            if not stream.name.startswith("the host"):
                self.host.join(stream.clock)

    def communicator(self, backend: Backend) -> SimulatedCommunicator:
        """``backend`` with collectives on a stream of its own."""
        return SimulatedCommunicator(backend, self, self._new_stream(f"the stream of collectives on {backend.axis!r}"))

    def carried(self, run: Callable[[], T]) -> tuple[Callable[[], T], Callable[[], None]]:
        started = self.host.clock.copy()
        ended = Clock()

        def inside() -> T:
            self.host.join(started)
            with simulated(self), watching(self):
                try:
                    return run()
                finally:
                    ended.join(self.host.clock)

        return inside, lambda: self.host.join(ended)

    def host_mark(self) -> Callable[[], None]:
        reached = self.host.clock.copy()
        return lambda: self.host.join(reached)

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

    def _storage_of(self, tensor: torch.Tensor, *, is_host: bool | None = False) -> TrackedStorage:
        """The storage's accesses; one that was not seen before is ``is_host`` (on another thread always)."""
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None:
            if threading.get_ident() != self._main:
                is_host = True
            elif not tensor.dim() and not is_host:
                is_host = None
            found = self._storages[storage._cdata] = TrackedStorage(storage, is_host=is_host, stream=None)
        return found

    def is_host(self, tensor: torch.Tensor) -> bool:
        with self._lock:
            return self._storage_of(tensor).is_host is True

    def add_host_memory(self, tensor: torch.Tensor, *, is_pinned: bool) -> None:
        with self._lock:
            found = self._storage_of(tensor, is_host=True)
            found.is_host, found.is_pinned, found.stream = True, is_pinned, None
            found.forget()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self._lock:
            self.notice_deaths()
            found = self._storages.get(storage._cdata)
            if found is None:
                found = self._storages[storage._cdata] = TrackedStorage(storage, is_host=False, stream=None)
            if found.nbytes == nbytes:
                return
            self._check_free(found, "its storage was resized")
            found.forget()
            found.nbytes = nbytes
            if nbytes:
                found.stream = self.current()
                self._touch_storage(found, 0, nbytes, self._access("allocation", found.stream), is_write=True)

    def notice_deaths(self) -> None:
        """Check storages that were freed since the last operation."""
        with self._lock:
            for key, found in list(self._storages.items()):
                if found.ref.expired():
                    self._check_free(found, "the last tensor of it is gone")
                    del self._storages[key]

    def _check_free(self, found: TrackedStorage, how: str) -> None:
        if found.is_host is not False:
            return  # a kernel has the value; page-locked memory is given back after its copies, other copies block
        stream = found.stream if found.stream is not None else self._compute
        clock = stream.clock.copy()
        clock.join(self.host.clock)
        for access, was_write, start, stop in found.unordered(clock):
            key = ("freed", access.name, access.place, stream)
            say = partial(freed, self._named(found), start, stop, access, was_write, how, stream.name, _place())
            self._report(key, say)

    def label(self, tensor: torch.Tensor, name: str, *, is_weak: bool = False) -> None:
        """Name the memory. ``is_weak``: unless it has a name."""
        with self._lock:
            found = self._storage_of(tensor)
            found.name = found.name if is_weak and found.name else name

    @staticmethod
    def _named(found: TrackedStorage) -> str:
        return found.name or f"a tensor of {found.nbytes} bytes"

    # operations

    def _access(self, name: str, stream: SimulatedStream) -> Access:
        stream.join(self.host.clock)
        self.num_operations += 1
        return Access(stream, stream.tick(), name, _place())

    def run(
        self, name: str, stream: SimulatedStream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """An operation that is queued on ``stream`` now."""
        with self._lock:
            access = self._access(name, stream)
            written = {id(tensor) for tensor in writes}
            for tensor in reads:
                if id(tensor) not in written:
                    self._touch(tensor, access, is_write=False)
            for tensor in writes:
                self._touch(tensor, access, is_write=True)

    def _touch(self, tensor: torch.Tensor, access: Access, *, is_write: bool) -> None:
        start, stop = bytes_of(tensor)
        if start != stop:
            self._touch_storage(self._storage_of(tensor), start, stop, access, is_write=is_write)

    def _touch_storage(self, found: TrackedStorage, start: int, stop: int, access: Access, *, is_write: bool) -> None:
        for old, was_write, begin, end in found.conflicts(start, stop, access, access.stream.clock, is_write=is_write):
            key = (old.name, old.place, access.name, access.place)
            self._report(key, partial(race, self._named(found), begin, end, old, was_write, access, is_write))

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
            found = [(tensor, self._storage_of(tensor)) for tensor in (*reads, *writes)]
            is_on_host = self._is_host_work(found)
            is_scalar = not found and bool(made) and not any(tensor.dim() for tensor in made)  # nobody's, until used
            stream = self.host if is_on_host or is_scalar else self.current()
            for tensor in made:
                kind = None if is_scalar else is_on_host
                storage = self._storage_of(tensor, is_host=kind)
                storage.is_host, storage.stream = kind, stream if kind is False else None
            if not is_on_host:
                for tensor in writes:
                    storage = self._storage_of(tensor)
                    if storage.is_host is None:
                        storage.is_host, storage.stream = False, stream
                reads = [tensor for tensor in reads if self._storage_of(tensor).is_host is not None]
            if reads or writes or made:
                self.run(name, stream, reads, [*writes, *made])
            if not is_on_host and (effects.blocks_host or self._blocks(operator, found, args, kwargs)):
                self.notice_deaths()
                self.host.join(stream.clock)

    def _is_host_work(self, found: Sequence[tuple[torch.Tensor, TrackedStorage]]) -> bool:
        if not found:
            return threading.get_ident() != self._main
        return all(storage.is_host is not False for _, storage in found)

    @staticmethod
    def _blocks(
        operator: Any,
        found: Sequence[tuple[torch.Tensor, TrackedStorage]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Does the host wait for an operation between its memory and the device's?"""
        on_host = [storage for _, storage in found if storage.is_host]
        if not on_host:
            return False
        is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return not (str(operator).startswith("aten.copy_") and is_async and all(each.is_pinned for each in on_host))

    def _is_new(self, tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
        key = tensor.untyped_storage()._cdata
        if key in self._storages or tensor.device.type != "cpu":
            return False
        return all(other.layout is not torch.strided or other.untyped_storage()._cdata != key for other in given)

    def _memory(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The dense tensors of CPU memory in these; others are reported. Those of ``meta`` have no memory."""
        found: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.device.type == "meta" or is_fake(tensor):
                continue
            if tensor.device.type != "cpu":
                self.unknown(name, f"a tensor is on {tensor.device}, and the simulated accelerator is the CPU")
                continue
            try:
                found += parts_of_memory(tensor)
            except TypeError as error:
                self.unknown(name, f"the memory of a tensor with layout {error} is not known")
        return found

    def host_access(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        self.notice_deaths()
        self.run(name, self.host, reads, writes)

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """The host reads a tensor's values, wherever it lies. Order: blocks the host."""
        with self._lock:
            self.notice_deaths()
            is_on_host = self._storage_of(tensor).is_host is not False
            stream = self.host if is_on_host else self.current()
            self.run("a read of values", stream, [tensor], [])
            self.host.join(stream.clock)

    def transfer(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Callable[[], None]:
        self.notice_deaths()
        stream = SimulatedStream("the disk", self.notice_deaths, self._launch, self._enter)
        self.run(name, stream, reads, writes)
        return lambda: self.host.join(stream.clock)

    # findings

    def unknown(self, name: str, why: str) -> None:
        """An operation cannot be checked."""
        text = f"{name} cannot be checked: {why}.\n  at:      {_place()}"
        self._report(("unknown", name, why), lambda: text)

    def _report(self, key: object, text: Callable[[], str]) -> None:
        with self._lock:
            found = self.findings.get(key)
            if found is None:
                self.findings[key] = StreamFinding(text())
            else:
                found.count += 1


def _place() -> str:
    """The lines of Python, outside of torch and of what every operation passes through, that are running."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _NUM_PLACES:
        code = frame.f_code
        if not _is_skipped(code.co_filename):
            name = code.co_filename if not found else code.co_filename.rpartition("/")[2]
            found.append(f"{name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", called by ".join(found)


@cache
def _is_skipped(file: str) -> bool:
    return any(part in file for part in _SKIPPED)
