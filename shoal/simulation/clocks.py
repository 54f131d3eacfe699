"""Streams, events and host threads as vector clocks.

A stream's clock says of every stream up to which operation it is known to have ended before the next operation here.
An operation of another stream happens before it if its number is not above that. A host thread is a stream too: what it
queues starts after what it has waited for.

Backward: autograd runs a node on the stream that was current when forward made it. Hooks run where their node does,
those after ``AccumulateGrad`` on the stream of the node that gave the gradient. The engine makes a node's stream wait
for the nodes before it, not for what hooks of leaves have queued since; at the end of the pass the stream that called
it waits for those of the leaves.

Where operations have durations, a clock also knows the one of all these that ends last: the next one starts then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch


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


_LEAF = 2**64 - 1  # the sequence number of AccumulateGrad


def running_node() -> int | None:
    """The sequence number of the node that autograd runs in this thread; all leaves have one. None: it runs none."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


class BackwardStreams:
    """Of one thread. A node is ordered after all nodes that ran before it, of whatever branch: a missing wait between
    branches is not found.
    """

    def __init__(self) -> None:
        self._made_from: list[int] = []  # sequence numbers, from which on nodes are made on ...
        self._made_on: list[SimulatedStream] = []
        self._node: int | None = None
        self._stream: SimulatedStream | None = None  # of ``_node``
        self._caller: SimulatedStream | None = None
        self._ended: dict[SimulatedStream, Clock] = {}  # the last node on each stream
        self._leaves: set[SimulatedStream] = set()

    def note(self, stream: SimulatedStream) -> None:
        """Nodes of a forward are made on ``stream`` from now on."""
        number = torch._C._autograd._get_sequence_nr()
        if self._made_from and self._made_from[-1] == number:
            self._made_on[-1] = stream
        else:
            self._made_from.append(number)
            self._made_on.append(stream)

    def current(self, entered: SimulatedStream, entered_in: object) -> SimulatedStream:
        """The current stream.

        Args:
            entered: the innermost stream that this thread has entered, or its first; ``entered_in``: the node that ran
                then.
        """
        if not self._made_from:
            return entered
        node = running_node()
        if node != self._node:
            self._change(node, entered)
        return entered if self._stream is None or (node is not None and node == entered_in) else self._stream

    def _change(self, node: int | None, entered: SimulatedStream) -> None:
        if self._stream is None or self._caller is None:
            self._caller = entered
            self._ended = {entered: entered.clock.copy()}
        elif self._node != _LEAF:
            self._ended[self._stream] = self._stream.clock.copy()
        self._node = node
        if node is None:
            for leaf in self._leaves:
                self._caller.join(leaf.clock)
            self._stream, self._caller = None, None
            self._leaves.clear()
            return
        if node == _LEAF:
            self._stream = self._stream or self._caller
            self._leaves.add(self._stream)
        else:
            index = bisect_right(self._made_from, node) - 1
            self._stream = self._made_on[index] if index >= 0 else self._caller
        for ended in self._ended.values():
            self._stream.join(ended)
