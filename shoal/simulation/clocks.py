"""Streams, events and host threads as vector clocks.

A stream's clock says of every stream up to which operation it is known to have ended before the next operation here.
An operation of another stream happens before it if its number is not above that. A host thread is a stream too: what it
queues starts after what it has waited for.
"""

from __future__ import annotations

from collections.abc import Callable

Clock = dict["SimulatedStream", int]


class SimulatedStream:
    """A queue of operations, or a thread of the host.

    Args:
        before: called before an edge is drawn to or from it.
    """

    def __init__(
        self,
        name: str,
        before: Callable[[], None],
        launch: Callable[[SimulatedStream], None],
        enter: Callable[[SimulatedStream | None], None],
    ) -> None:
        self.name = name
        self.clock: Clock = {self: 0}
        self._before, self._launch, self._enter = before, launch, enter

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> int:
        """The number of the next operation."""
        self.clock[self] += 1
        return self.clock[self]

    def join(self, clock: Clock) -> None:
        """What comes next starts after everything that ``clock`` knows."""
        own = self.clock
        for stream, number in clock.items():
            if number > own.get(stream, 0):
                own[stream] = number

    def wait_stream(self, other: SimulatedStream) -> None:
        self._before()
        self._launch(self)
        self.join(other.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._before()
        self._launch(self)
        self.join(event.clock)

    def __enter__(self) -> SimulatedStream:
        self._enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._enter(None)


class SimulatedEvent:
    """A place in a stream. Before it is recorded, waiting for it waits for nothing, as on CUDA.

    Args:
        before: called before an edge is drawn to or from it.
        host: the stream of the calling thread.
    """

    def __init__(self, before: Callable[[], None], host: Callable[[], SimulatedStream]) -> None:
        self.clock: Clock = {}
        self._before, self._host = before, host

    def record(self, stream: SimulatedStream) -> None:
        self._before()
        stream.join(self._host().clock)
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self._before()
        self._host().join(self.clock)
