"""Collectives as NCCL runs them, on a stream of their own, with the values of a backend of the CPU.

A call starts after what is queued on the current stream, ``wait()`` makes the current stream wait for it. Values travel
when the backend carries them; what they are sent from is copied when the call is issued, because on a real stream
nothing later can change it if the streams wait as they must, and that is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from shoal.comm.finished import own_range
from shoal.comm.protocol import Backend, Work
from shoal.comm.sums import is_same_memory
from shoal.simulation.clocks import SimulatedEvent, SimulatedStream
from shoal.simulation.issue_order import Issues
from shoal.simulation.times import Cost, StreamTimes


class StreamsOfCollectives(Protocol):
    """What the communicators of a simulated accelerator need of it."""

    def current(self) -> SimulatedStream: ...

    def event(self) -> SimulatedEvent: ...

    def is_host(self, tensor: torch.Tensor) -> bool: ...

    def add_host_memory(self, tensor: torch.Tensor, *, is_pinned: bool) -> None: ...

    def label(self, tensor: torch.Tensor, name: str, *, is_weak: bool = False) -> None: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def run(
        self,
        name: str,
        stream: SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        cost: Callable[[StreamTimes], Cost] | None = None,
    ) -> None: ...


class SimulatedWork:
    """A collective under way.

    Args:
        held: its tensors, which NCCL keeps until the current stream waits.
        deliver: waits for the values, and writes them where the collective does.
        land: what the current stream does after it.
    """

    def __init__(
        self,
        accelerator: StreamsOfCollectives,
        event: SimulatedEvent,
        out: torch.Tensor,
        held: Sequence[torch.Tensor],
        deliver: Callable[[], None],
        land: Callable[[], None] | None,
    ) -> None:
        self._accelerator, self._event, self._out = accelerator, event, out
        self._held: Sequence[torch.Tensor] = held
        self._deliver, self._land = deliver, land
        self._is_waited = False

    def wait(self) -> torch.Tensor:
        if not self._is_waited:
            with self._accelerator.paused():
                self._deliver()
            self._accelerator.current().wait_event(self._event)
            self._is_waited = True
            if self._land is not None:
                with torch.no_grad():
                    self._land()
            self._held, self._land = (), None
        return self._out

    def drain(self) -> None:
        self.wait()


class SimulatedCommunicator:
    """The ranks along one axis, over NCCL's stream in the simulation. Host memory goes to the backend as it is."""

    def __init__(
        self,
        backend: Backend,
        accelerator: StreamsOfCollectives,
        stream: SimulatedStream,
        ranks: tuple[int, ...],
        issues: Issues | None = None,
    ) -> None:
        self.ranks = ranks
        self._issues = issues
        self.axis, self.rank, self.size = backend.axis, backend.rank, backend.size
        self._backend, self._accelerator, self._stream = backend, accelerator, stream

    @property
    def scratch_nbytes(self) -> int:
        return self._backend.scratch_nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        source = own_range(full, self.rank, self.size) if shard is None else shard
        return self._issue(
            "all_gather", label, full, source, full, lambda sent: self._backend.all_gather(full, sent, label=label)
        )

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        is_direct = not accumulate and out.dtype == full.dtype
        landing = out if is_direct else torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))

        def land() -> None:
            if accumulate:
                out.add_(landing)
            else:
                out.copy_(landing)

        return self._issue(
            "reduce_scatter",
            label,
            out,
            full,
            landing,
            lambda sent: self._backend.reduce_scatter(sent, landing, scale=scale, label=label),
            land=None if is_direct else land,
        )

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        return self._issue(
            "all_reduce",
            label,
            full,
            full,
            full,
            lambda sent: self._backend.all_reduce(sent, scale=scale, label=label),
            is_copied=True,
        )

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        return self._issue(
            "all_to_all",
            label,
            out,
            source,
            out,
            lambda sent: self._backend.all_to_all(
                out, sent, out_splits=out_splits, source_splits=source_splits, label=label
            ),
        )

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        return self._issue(
            "send", label, tensor, tensor, None, lambda sent: self._backend.send(sent, peer, label=label), peer=peer
        )

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        return self._issue(
            "recv", label, tensor, None, tensor, lambda _: self._backend.recv(tensor, peer, label=label), peer=peer
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        return self._issue(
            "broadcast",
            label,
            tensor,
            tensor,
            tensor,
            lambda sent: self._backend.broadcast(sent, source, label=label),
            is_copied=True,
            peer=source,
        )

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        result = vector.new_empty(self.size, vector.numel())
        return self._issue(
            "exchange",
            label,
            result,
            vector,
            result,
            lambda sent: self._backend.exchange(sent, label=label),
            is_copied=True,
        )

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

    def _issue(
        self,
        name: str,
        label: str,
        out: torch.Tensor,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        start: Callable[[torch.Tensor], Work],
        *,
        is_copied: bool = False,
        land: Callable[[], None] | None = None,
        peer: int | None = None,
    ) -> Work:
        """Queue a call.

        Args:
            out: what ``wait()`` returns. ``source``: what is sent; ``target``: what is written.
            start: gives the call to the backend, with a copy of the source.
            is_copied: the backend writes into the copy, or returns another tensor: copied to ``target`` when done.
            land: what the current stream does after ``wait()``.
            peer: of a message, or the source of a broadcast.
        """
        accelerator = self._accelerator
        tensors = [tensor for tensor in (source, target) if tensor is not None]
        is_on_stream = not any(accelerator.is_host(tensor) for tensor in tensors)
        if is_on_stream:
            self._stream.wait_stream(accelerator.current())
        waiting: AbstractContextManager[None] = nullcontext()
        if self._issues is not None:
            waiting = self._issues.issue(name, label, peer, is_on_stream=is_on_stream)
        with accelerator.paused(), torch.no_grad():
            sent = tensors[0] if source is None else source.detach().clone()
            work = start(sent)
        if not is_on_stream:  # the host waits for the peers
            event = accelerator.event()
        else:
            for tensor in tensors:
                accelerator.label(tensor, f"memory of unit {label!r}", is_weak=True)
            reads, writes = accesses(source, target)
            nbytes = max(tensor.nbytes for tensor in tensors)
            accelerator.run(
                f"{name} {label!r}",
                self._stream,
                reads,
                writes,
                lambda times: times.collective(name, nbytes, self.ranks),
            )
            event = accelerator.event()
            event.record(self._stream)

        def deliver() -> None:
            with torch.no_grad(), waiting:
                values = work.wait()
                if is_copied and target is not None:
                    target.detach().copy_(values.view(target.shape))

        return SimulatedWork(accelerator, event, out, [*tensors, out], deliver, land)


def accesses(source: torch.Tensor | None, target: torch.Tensor | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if source is not None and target is not None and source is not target and is_same_memory(source, target):
        source = None
    return [t for t in (source,) if t is not None], [t for t in (target,) if t is not None]
