"""How long operations take on a machine, and when each starts: after what its stream waits for, on a free way."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from typing import Any

from shoal.simulation.clocks import SimulatedStream, TimedOperation
from shoal.simulation.collective_times import collective_seconds
from shoal.simulation.kernels import Kernel, kernel_seconds
from shoal.simulation.machines import GpuNode

COMPUTE, COMMUNICATION, STAGES, COPY, HOST, UPDATE, DISK = (
    "compute",
    "communication",
    "other stages",
    "copies",
    "host",
    "host updates",
    "disk",
)
KINDS = (COMPUTE, COMMUNICATION, STAGES, COPY, UPDATE, DISK, HOST)
COLLECTIVE_WAYS = ("NVLink", "the network")
_TO_DEVICE, _TO_HOST = ("bus to the device",), ("bus to the host",)


@dataclass(frozen=True)
class Cost:
    """Of one operation. ``ways``: what each only one operation at a time can use; empty: its stream alone.

    ``nbytes``: of a collective or a kernel. ``ranks``: of a collective. ``flops``: of a kernel.
    """

    kind: str
    seconds: float
    ways: tuple[str, ...] = ()
    nbytes: int = 0
    ranks: tuple[int, ...] = ()
    flops: int = 0


class StreamTimes:
    """The operations of one rank with their times."""

    def __init__(self, machine: GpuNode, num_ranks: int) -> None:
        self.machine = machine
        self.operations: list[TimedOperation] = []
        self._ranks_per_node = min(num_ranks, machine.gpus_per_node)
        self._busy: dict[str, list[tuple[float, float]]] = {}
        self._queued: dict[SimulatedStream, tuple[list[int], list[TimedOperation]]] = {}  # with their numbers
        self._known: dict[SimulatedStream, dict[SimulatedStream, int]] = {}  # by the last operation of each stream

    def add(self, stream: SimulatedStream, name: str, cost: Cost) -> None:
        """An operation is queued on ``stream``, whose clock knows everything that it waits for."""
        before = stream.clock.last
        start = stream.clock.seconds
        if cost.ways:
            start = self._occupy(cost.ways, start, cost.seconds)
        seconds = cost.seconds
        if cost.kind == COMPUTE and self.machine.overlap > 1:
            seconds = self._slowed(start, seconds)
        waits = self._waits(stream)
        end, of_cost = start + seconds, (cost.nbytes, cost.ranks, cost.flops)
        made = TimedOperation(stream, name, cost.kind, start, end, before, waits, *of_cost)
        stream.clock.last = made
        self.operations.append(made)
        numbers, operations = self._queued.setdefault(stream, ([], []))
        numbers.append(stream.clock[stream])
        operations.append(made)

    def _waits(self, stream: SimulatedStream) -> tuple[TimedOperation, ...]:
        """The last operation of each other stream that ``stream`` knows of, and did not before."""
        known, made = self._known.setdefault(stream, {}), []
        for other, number in stream.clock.items():
            if other is not stream and number > known.get(other, 0):
                known[other] = number
                numbers, operations = self._queued.get(other, ([], []))
                if at := bisect_right(numbers, number):
                    made.append(operations[at - 1])
        return tuple(made)

    def add_received(self, stream: SimulatedStream, name: str, sent: float, cost: Cost) -> None:
        """A message arrives on ``stream``, which waits until another stage has sent it.

        Args:
            sent: when that stage began to send, in seconds.
        """
        if sent > stream.clock.seconds:
            stream.tick()
            self.add(stream, f"waiting for {name}", Cost(STAGES, sent - stream.clock.seconds))
        stream.tick()
        self.add(stream, name, cost)

    def _occupy(self, ways: Sequence[str], start: float, seconds: float) -> float:
        """The first time from ``start`` on at which all ``ways`` are free for so long."""
        busy = [self._busy.setdefault(way, []) for way in ways]
        before = None
        while start != before:
            before = start
            for each in busy:
                index = max(bisect_left(each, (start, start)) - 1, 0)
                while index < len(each) and start + seconds > each[index][0]:
                    start = max(start, each[index][1])
                    index += 1
        for each in busy:
            insort(each, (start, start + seconds))
        return start

    def _slowed(self, start: float, seconds: float) -> float:
        """Of a kernel that shares the GPU with the collectives and messages that run meanwhile."""
        shared, stop = 0.0, start + seconds
        for way in COLLECTIVE_WAYS:
            near = []
            for busy in (self._busy.get(each, []) for each in directions(way)):
                near.append(busy[max(bisect_left(busy, (start, start)) - 1, 0) : bisect_left(busy, (stop,))])
            reached = start
            for begin, end in merge(*near):
                shared += max(min(end, stop) - max(begin, reached), 0.0)
                reached = max(reached, end)
        return seconds + (self.machine.overlap - 1) * min(shared, seconds)

    # costs

    def launch(self) -> Cost:
        return Cost(HOST, self.machine.launch_seconds)

    def kernel(self, operator: Any, args: Sequence[Any], kwargs: Any, result: Any, nbytes: int) -> Cost:
        """An operator on the device that reads and writes ``nbytes`` in all."""
        return self.kernel_cost(Kernel.of(operator, args, kwargs, result, nbytes))

    def kernel_cost(self, kernel: Kernel) -> Cost:
        return Cost(COMPUTE, kernel_seconds(kernel, self.machine), nbytes=kernel.nbytes, flops=kernel.flops)

    def copy(self, nbytes: int, *, is_to_host: bool, is_pinned: bool) -> Cost:
        rate = self.machine.bus_bandwidth if is_pinned else self.machine.pageable_bandwidth
        return Cost(COPY, self.machine.kernel_seconds + nbytes / rate, _TO_HOST if is_to_host else _TO_DEVICE)

    def collective(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> Cost:
        machine = self.machine
        is_in_node = len({rank // machine.gpus_per_node for rank in ranks}) == 1
        seconds = collective_seconds(op, nbytes, ranks, machine.gpus_per_node, machine.links)
        ways: tuple[str, ...] = directions(COLLECTIVE_WAYS[not is_in_node])
        ways = ways[:1] if op == "send" else ways[1:] if op == "recv" else ways
        return Cost(COMMUNICATION, seconds, ways, nbytes, ranks)

    def on_host(self, nbytes: int, *, is_main: bool) -> Cost:
        """Work of the host that reads and writes ``nbytes`` of its memory, which all ranks of the node share."""
        return Cost(HOST if is_main else UPDATE, nbytes * self._ranks_per_node / self.machine.host_bandwidth)

    def disk(self, nbytes: int) -> Cost:
        return Cost(DISK, nbytes * self._ranks_per_node / self.machine.disk_bandwidth, ("the disks",))


@cache
def directions(way: str) -> tuple[str, str]:
    """Links carry as much in each direction at the same time: what sends over ``way``, and what receives."""
    return f"sending over {way}", f"receiving over {way}"


def exposed(
    operations: Sequence[TimedOperation], stream: SimulatedStream, begin: float, end: float
) -> dict[str, float]:
    """What ``stream`` did between two times, in seconds by kind.

    While it waits, the time belongs to the operation that it waits for, and before that one started, to the one that
    this waited for in turn.

    Args:
        end: not before the end of the last operation of ``stream``; when its clock's last operation ended.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    reached = begin
    for operation in operations:
        if operation.stream is stream and operation.end > begin:
            _attribute(seconds, reached, operation.start, operation.before, operation.kind)
            seconds[operation.kind] += operation.end - max(operation.start, reached)
            reached = operation.end
    _attribute(seconds, reached, end, stream.clock.last, HOST)
    return seconds


def _attribute(seconds: dict[str, float], begin: float, end: float, waited: TimedOperation | None, kind: str) -> None:
    """Give the time from ``begin`` to ``end`` to what something of ``kind`` waited for, and what that waited for."""
    while waited is not None and end > begin:
        if waited.end < end:  # another operation was in the way
            seconds[kind] += end - max(waited.end, begin)
            end = max(waited.end, begin)
        seconds[waited.kind] += end - min(max(waited.start, begin), end)
        end = min(max(waited.start, begin), end)
        kind, waited = waited.kind, waited.before
