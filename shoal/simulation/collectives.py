"""Collectives as NCCL runs them, on a stream of their own, with the values of a backend of the CPU.

A call starts after what is queued on the current stream, ``wait()`` makes the current stream wait for it. Values travel
when the backend carries them; what they are sent from is copied when the call is issued, because on a real stream
nothing later can change it if the streams wait as they must, and that is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from shoal.comm.fake import FakeStageCommunicator
from shoal.comm.parts import symmetric_memory_error
from shoal.comm.protocol import Backend, Call, Work
from shoal.simulation.clocks import SimulatedEvent, SimulatedStream
from shoal.simulation.issue_order import Issues
from shoal.simulation.times import Cost, StreamTimes
from shoal.streams import MemoryPool

_MESSAGES = ("send", "recv", "batch")


class StreamsOfCollectives(Protocol):
    """What the communicators of a simulated accelerator need of it."""

    def current(self) -> SimulatedStream: ...

    def event(self) -> SimulatedEvent: ...

    def is_host(self, tensor: torch.Tensor) -> bool: ...

    def label(self, tensor: torch.Tensor, name: str, *, is_weak: bool = False) -> None: ...

    def pool(self) -> MemoryPool: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def connect(self, communicator: SimulatedCommunicator, op: str) -> None: ...

    def num_nodes(self, ranks: Sequence[int]) -> int: ...

    def run(
        self,
        name: str,
        stream: SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        cost: Callable[[StreamTimes], Cost] | None = None,
    ) -> object: ...


class SimulatedWork:
    """A collective under way.

    Args:
        tensors: of the call, which NCCL keeps until the current stream waits.
        deliver: waits for the values, and writes them where the collective does.
        land: what the current stream does after it.
    """

    def __init__(
        self,
        accelerator: StreamsOfCollectives,
        event: SimulatedEvent,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        deliver: Callable[[], None],
        land: Callable[[], object] | None,
    ) -> None:
        self._accelerator, self._event, self._out = accelerator, event, out
        self._tensors: Sequence[torch.Tensor] = tensors
        self._deliver, self._land = deliver, land
        self._is_waited = False
        self._error: Exception | None = None

    def wait(self) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        if not self._is_waited:
            try:
                with self._accelerator.paused():
                    self._deliver()
            except Exception as error:
                self._error = error  # what a recovery that waits once more is told
                raise
            self._accelerator.current().wait_event(self._event)
            self._is_waited = True
            if self._land is not None:
                with torch.no_grad():
                    self._land()
            self._tensors, self._land, self._deliver = (), None, lambda: None
        return self._out

    def drain(self) -> None:
        self.wait()


class SimulatedCommunicator(Backend):
    """The ranks along one axis, over NCCL's stream in the simulation. Host memory goes to the backend as it is."""

    def __init__(
        self,
        backend: Backend,
        accelerator: StreamsOfCollectives,
        stream: SimulatedStream,
        ranks: tuple[int, ...],
        issues: Issues | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(backend.axis, backend.rank, backend.size)
        self.ranks, self.number = ranks, number
        self.carries_values = backend.carries_values
        self._issues = issues
        self._backend, self._accelerator, self._stream = backend, accelerator, stream

    @property
    def scratch_nbytes(self) -> int:
        return self._backend.scratch_nbytes

    def new_pool(self, device: torch.device, *, is_symmetric: bool) -> MemoryPool:
        return self._accelerator.pool()

    def open_symmetric_memory(self, device: torch.device) -> bool:
        """False: parts are sent. Raises: CommError: the ranks are on several nodes, as with NCCL."""
        if (num_nodes := self._accelerator.num_nodes(self.ranks)) > 1:
            raise symmetric_memory_error(self.axis, f"its ranks are on {num_nodes} nodes")
        return False

    def issue(self, call: Call) -> Work:
        result = call.result
        land: Callable[[], object] | None = None
        if call.verb == "reduce_scatter" and (call.accumulate or result.dtype != call.sent.dtype):
            landing = torch.empty_like(result, dtype=torch.promote_types(result.dtype, torch.float32))
            land = partial(result.add_ if call.accumulate else result.copy_, landing)
            call = call._replace(result=landing, accumulate=False)
        work, event, waiting = self._queue(call)

        def deliver() -> None:
            with torch.no_grad(), waiting:
                values = work.wait()
                if call.source is None and call.verb not in _MESSAGES:  # the backend wrote into the copy
                    call.result.detach().copy_(values)

        reads, writes = accesses(call)
        return SimulatedWork(self._accelerator, event, result, (*reads, *writes, result), deliver, land)

    def _queue(self, call: Call) -> tuple[Work, SimulatedEvent, AbstractContextManager[None]]:
        """Queue a call on its stream.

        Returns: the backend's work, an event at the end of the call, and a block in which the host waits for values.
        """
        accelerator = self._accelerator
        is_on_stream = not (accelerator.is_host(call.sent) or accelerator.is_host(call.result))
        reads, writes = accesses(call)
        if is_on_stream:
            for one in call.messages or (call,):
                accelerator.connect(self, one.verb)
            self._stream.wait_stream(accelerator.current())
        waiting: AbstractContextManager[None] = nullcontext()
        if self._issues is not None:
            waiting = self._issues.issue(call, is_on_stream=is_on_stream)
        work = self._begin(call)
        event = accelerator.event()
        if is_on_stream:  # else the host waits for the peers
            for tensor in (*reads, *writes):
                accelerator.label(tensor, f"memory of unit {call.label!r}", is_weak=True)
            accelerator.run(
                f"{call.verb} {call.label!r}",
                self._stream,
                reads,
                writes,
                lambda times: times.collective(call.verb, most_nbytes(call), self.ranks),
            )
            event.record(self._stream)
        return work, event, waiting

    def _begin(self, call: Call) -> Work:
        """Give a call to the backend, with a copy of what it sends."""
        with self._accelerator.paused(), torch.no_grad():
            return self._backend.issue(_with_copies(call))

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        with self._accelerator.paused():
            return self._backend.gather_objects(value, label=label)

    def barrier(self, *, label: str) -> None:
        with self._accelerator.paused():
            self._backend.barrier(label=label)

    def drain(self) -> None:
        with self._accelerator.paused():
            self._backend.drain()

    def close(self) -> None:
        self._backend.close()


def accesses(call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes."""
    each = call.messages or (call,)
    return [one.sent for one in each if one.verb != "recv"], [one.result for one in each if one.verb != "send"]


def most_nbytes(call: Call) -> int:
    """Of what a call reads, or of what it writes if that is more."""
    return max(sum(tensor.nbytes for tensor in tensors) for tensors in accesses(call))


def _with_copies(call: Call) -> Call:
    """The call with copies of what it sends."""
    if call.messages:
        return call._replace(messages=tuple(map(_with_copies, call.messages)))
    if call.source is not None:
        return call._replace(source=call.source.detach().clone())
    return call if call.verb == "recv" else call._replace(result=call.result.detach().clone())


class SimulatedStageCommunicator(SimulatedCommunicator):
    """Ranks of several pipeline stages of a dry run. A message or collective begins when all that take part are ready.

    What another stage brings takes its place in a stream when it is waited for.

    Args:
        new_stream: makes a stream. Messages from and to each stage have one of their own.
    """

    def __init__(
        self,
        backend: FakeStageCommunicator,
        accelerator: StreamsOfCollectives,
        ranks: tuple[int, ...],
        times: StreamTimes,
        new_stream: Callable[[str], SimulatedStream],
        number: int,
    ) -> None:
        stream = new_stream(f"the stream of collectives on {backend.axis!r}")
        super().__init__(backend, accelerator, stream, ranks, number=number)
        self._stages = backend
        self._times = times
        self._new_stream = new_stream
        self._of_messages: dict[tuple[str, int], SimulatedStream] = {}

    def _stream_of(self, call: Call) -> SimulatedStream:
        if call.verb not in ("send", "recv"):
            return self._stream
        way = "to" if call.verb == "send" else "from"
        if (way, call.peer) not in self._of_messages:
            self._of_messages[way, call.peer] = self._new_stream(f"the stream of messages {way} stage {call.peer}")
        return self._of_messages[way, call.peer]

    def issue(self, call: Call) -> Work:
        return self.issue_each(call) if call.messages else super().issue(call)

    def _queue(self, call: Call) -> tuple[Work, SimulatedEvent, AbstractContextManager[None]]:
        accelerator, stages, times = self._accelerator, self._stages, self._times
        verb, peer, stream = call.verb, call.peer, self._stream_of(call)
        stream.wait_stream(accelerator.current())
        accelerator.connect(self, verb)
        work = self._begin(call)
        what = f"{verb} {call.label!r}"
        accelerator.run(what, stream, *accesses(call))
        ranks = (self.ranks[self.rank], self.ranks[peer]) if verb in ("send", "recv") else self.ranks
        cost = times.collective(verb, most_nbytes(call), ranks)
        event = accelerator.event()
        if verb == "send":
            times.add(stream, what, cost)
            assert stream.clock.last is not None
            stages.post(peer, call.label, call.result, stream.clock.last.start)
            event.record(stream)
            return work, event, nullcontext()
        number = stages.expect(peer) if verb == "recv" else stages.tell(stream.clock.seconds)

        @contextmanager
        def arriving() -> Iterator[None]:
            if verb == "recv":
                sent = stages.take(peer, number, call.label, call.result)
            else:
                sent = max(stages.hear(number, call.label))
            times.add_received(stream, what, sent, cost)
            event.record(stream)
            yield

        return work, event, arriving()
