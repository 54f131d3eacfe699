"""Streams, events and host threads as vector clocks.

A stream's clock says of every stream up to which operation it is known to have ended before the next operation here.
An operation of another stream happens before it if its number is not above that. A host thread is a stream too: what it
queues starts after what it has waited for.

Where operations have durations, a clock also knows the one of all these that ends last: the next one starts then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class TimedOperation:
    """An operation with its times, in seconds since the simulation began.

    Attributes: ``kind``: what it is a part of, for sums. ``before``: which ended when this one could start; None: it
    waited for nothing. ``waits``: the last of each other stream that its stream has waited for since the one before.
    ``nbytes``, ``ranks``: of a collective, and who takes part. ``flops``: of a kernel, whose ``nbytes`` it reads and
    writes.
    """

    stream: SimulatedStream
    name: str
    kind: str
    start: float
    end: float
    before: TimedOperation | None
    waits: tuple[TimedOperation, ...] = ()
    nbytes: int = 0
    ranks: tuple[int, ...] = ()
    flops: int = 0


class Clock(dict["SimulatedStream", int]):
    """What is known to be over: per stream the number of an operation; ``last``: the one of them that ends last."""

    last: TimedOperation | None = None

    @property
    def seconds(self) -> float:
        """When everything that this clock knows is over."""
        return 0.0 if self.last is None else self.last.end

    def join(self, other: Clock) -> None:
        """Know also what ``other`` knows."""
        for stream, number in other.items():
            if number > self.get(stream, 0):
                self[stream] = number
        if other.last is not None and other.last.end > self.seconds:
            self.last = other.last

    def copy(self) -> Clock:
        made = Clock(self)
        made.last = self.last
        return made


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
        self.clock = Clock({self: 0})
        self._before, self._launch, self._enter = before, launch, enter

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> int:
        """The number of the next operation."""
        self.clock[self] += 1
        return self.clock[self]

    def join(self, clock: Clock) -> None:
        """What comes next starts after everything that ``clock`` knows."""
        self.clock.join(clock)

    def wait_clock(self, clock: Clock) -> None:
        """As ``join``, where the program asks for it: every wait goes through here."""
        self.join(clock)

    def wait_stream(self, other: SimulatedStream) -> None:
        self._before()
        self._launch(self)
        self.wait_clock(other.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._before()
        self._launch(self)
        self.wait_clock(event.clock)

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
        self.clock = Clock()
        self._before, self._host = before, host

    def record(self, stream: SimulatedStream) -> None:
        self._before()
        stream.join(self._host().clock)
        self.clock = stream.clock.copy()

    def query(self) -> bool:
        """True: nothing of a simulation is still to run. The host's clock stays as it is."""
        return True

    def synchronize(self) -> None:
        self._before()
        self._host().wait_clock(self.clock)
