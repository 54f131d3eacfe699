"""Streams, events and host memory of an accelerator: CUDA's through torch, or a simulated one's on the CPU.

Everything in Shoal that orders work of an accelerator goes through these functions. On a CPU without a simulation they
do nothing, or the plain thing. A simulation belongs to one rank; threads that ``carried`` starts see it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class MemoryPool(Protocol):
    """Memory of an accelerator apart from all other, in segments that are not divided.

    An allocation takes the smallest segment that fits of those that are free, of its stream, or makes one. So what is
    allocated and freed in the same order in each step has the same addresses, those of a few segments used in turn.
    """

    @property
    def native(self) -> Any:
        """What a backend registers."""
        ...

    @property
    def free_nbytes(self) -> int:
        """Bytes of the segments that are free."""
        ...

    def allocating(self) -> AbstractContextManager[None]:
        """Inside the block this thread allocates in it."""
        ...


class Streams(Protocol):
    """The streams of one accelerator. Streams and events are torch's, or have their methods."""

    def stream(self) -> Any:
        """A new stream, other than the current one."""
        ...

    def event(self) -> Any: ...

    def current(self) -> Any:
        """The current stream of this thread."""
        ...

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Memory of ``tensor`` is not reused before what ``stream`` has queued when the tensor is freed."""
        ...


class Simulation(Streams, Protocol):
    """A simulated accelerator: its streams, and what it must be told because no operator of torch shows it."""

    @property
    def host_nbytes(self) -> int | None:
        """Host memory of this rank's node; None: what there really is."""
        ...

    @property
    def is_cpu(self) -> bool:
        """True if the rank computes on the CPU: there are no streams, and all memory is the host's."""
        ...

    @property
    def is_timed_gpu(self) -> bool:
        """True in a dry run of a GPU."""
        ...

    def multiplies_blocks(self, width: int) -> bool:
        """True if the GPU multiplies matrices of 8 bits with a scale for each ``width`` elements of a row."""
        ...

    @property
    def multiplies_groups(self) -> bool:
        """True if torch has one kernel for the products of groups of rows on the GPU of a dry run."""
        ...

    def is_host(self, tensor: torch.Tensor) -> bool: ...

    def add_host_memory(self, tensor: torch.Tensor, *, is_pinned: bool) -> None: ...

    def label(self, tensor: torch.Tensor, name: str, kind: str) -> None: ...

    def optimizer_step(self) -> AbstractContextManager[None]: ...

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None: ...

    def pool(self) -> MemoryPool: ...

    def note_cuda_graphs(self) -> None:
        """Forward and backward are replayed as CUDA graphs, which keep the memory of their activations."""
        ...

    def host_access(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None: ...

    def read_on_host(self, tensor: torch.Tensor) -> None: ...

    def transfer(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> Callable[[], None]: ...

    def carried(self, run: Callable[[], T], thread: str) -> tuple[Callable[[], T], Callable[[], None]]: ...

    def host_mark(self) -> Callable[[], None]: ...

    def synchronize(self) -> None: ...

    def communicator(self, backend: Any, ranks: tuple[int, ...], shared: dict[str, Any] | None, number: int) -> Any: ...


class TorchStreams:
    """The streams of a device that torch drives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.Stream(self._device)

    def event(self) -> Any:
        return torch.Event(self._device)

    def current(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


class _OfThread(threading.local):
    simulation: Simulation | None = None


_OF_THREAD = _OfThread()


def simulation() -> Simulation | None:
    """The simulated accelerator of this thread, or None."""
    return _OF_THREAD.simulation


def _simulated_device() -> Simulation | None:
    """The simulation of this thread, where it has streams and memory of its own."""
    made = _OF_THREAD.simulation
    return None if made is None or made.is_cpu else made


@contextmanager
def simulated(accelerator: Simulation) -> Iterator[None]:
    """Inside the block, the CPU is ``accelerator`` for this thread."""
    before, _OF_THREAD.simulation = _OF_THREAD.simulation, accelerator
    try:
        yield
    finally:
        _OF_THREAD.simulation = before


def is_accelerator(device: torch.device) -> bool:
    """True if ``device`` has streams, and memory other than the host's."""
    return device.type != "cpu" or _simulated_device() is not None


def streams_of(device: torch.device) -> Streams | None:
    """None: the device is a CPU."""
    return TorchStreams(device) if device.type != "cpu" else _simulated_device()


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor is in the host's memory, and not in an accelerator's."""
    if tensor.device.type != "cpu":
        return False
    return (device := _simulated_device()) is None or device.is_host(tensor)


def host_memory(tensor: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
    """``tensor``, known from now on as memory of the host.

    Args:
        is_pinned: page-locked, if there is an accelerator; else copies to and from an accelerator block the host.
    """
    if _OF_THREAD.simulation is not None:
        _OF_THREAD.simulation.add_host_memory(tensor, is_pinned=is_pinned)
    return tensor


def keep_for_current_stream(*tensors: torch.Tensor) -> None:
    """Memory that another stream may have allocated is not reused before what the current one has queued by the time
    the tensors are freed, and so not before collectives that it has waited for.
    """
    for tensor in tensors:
        if (streams := streams_of(tensor.device)) is not None and not is_in_host_memory(tensor):
            streams.record_stream(tensor, streams.current())


def name_memory(tensor: torch.Tensor, name: str, kind: str = "") -> torch.Tensor:
    """``tensor``, whose memory has this name in reports from now on.

    Args:
        kind: that it has in the ledger.
    """
    if _OF_THREAD.simulation is not None:
        _OF_THREAD.simulation.label(tensor, name, kind)
    return tensor


@contextmanager
def optimizer_step() -> Iterator[None]:
    """Inside the block, memory is allocated for the optimizer's step: what of it stays is optimizer state."""
    with nullcontext() if _OF_THREAD.simulation is None else _OF_THREAD.simulation.optimizer_step():
        yield


def allocating_in(pool: MemoryPool | None) -> AbstractContextManager[None]:
    """Inside the block this thread allocates in ``pool``; None: as outside."""
    return nullcontext() if pool is None else pool.allocating()


def resize_storage(storage: torch.UntypedStorage, nbytes: int, pool: MemoryPool | None = None) -> None:
    """Free the memory of a storage (0), or allocate it again, on the current stream, in ``pool``."""
    with allocating_in(pool):
        if _OF_THREAD.simulation is not None:
            _OF_THREAD.simulation.resize(storage, nbytes)
        storage.resize_(nbytes)


def host_access(name: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> None:
    """This thread reads and writes host memory now, in a kernel that is no operator of torch."""
    if _OF_THREAD.simulation is not None:
        _OF_THREAD.simulation.host_access(name, reads, writes)


def host_transfer(
    name: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
) -> Callable[[], None]:
    """Other threads read and write host memory from now on. Returns: to be called when this thread has waited."""
    accelerator = _OF_THREAD.simulation
    return _nothing if accelerator is None else accelerator.transfer(name, reads, writes)


def carried(run: Callable[[], T], thread: str) -> tuple[Callable[[], T], Callable[[], None]]:
    """``run`` for another thread, of this name, which starts after what this one has done, on this one's device.

    A new thread is on device 0. What touches another rank's device there makes a context on it, of hundreds of MB.

    Returns: it, and what a thread calls that has waited for its end.
    """
    accelerator = _OF_THREAD.simulation
    if accelerator is not None:
        return accelerator.carried(run, thread)
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return called(run), _nothing  # a mode of tensors without values is one thread's
    if not torch.accelerator.is_available():
        return run, _nothing
    index = torch.accelerator.current_device_index()

    def on_device() -> T:
        torch.accelerator.set_device_index(index)
        return run()

    return on_device, _nothing


def called(run: Callable[[], T]) -> Callable[[], T]:
    """Call ``run()`` now. Returns: a function that returns what it has returned, or raises what it has raised."""
    result: Future[T] = Future()
    try:
        result.set_result(run())
    except BaseException as error:
        result.set_exception(error)
    return result.result


def host_mark() -> Callable[[], None]:
    """What another thread calls that has waited until this one was here."""
    return _nothing if _OF_THREAD.simulation is None else _OF_THREAD.simulation.host_mark()


def _nothing() -> None:
    return None


class ThreadResult(Generic[T]):
    """What a function on a ``HostThread`` returns, or will return."""

    def __init__(self, future: Future[T], joined: Callable[[], None]) -> None:
        self._future = future
        self._joined = joined

    def result(self) -> T:
        """Order: blocks the host until it is there. Raises: what the function raised."""
        try:
            return self._future.result()
        finally:
            self._joined()


class HostThread:
    """A thread that calls functions in turn, while the one that asks for them goes on. It starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, run: Callable[[], T]) -> ThreadResult[T]:
        """Call ``run()`` after the functions before. Does not block the host."""
        run, joined = carried(run, self._name)
        return ThreadResult(self._pool.submit(run), joined)

    def close(self) -> None:
        """End the thread after what was submitted."""
        self._pool.shutdown()
