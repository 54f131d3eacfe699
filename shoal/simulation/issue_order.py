"""In which order ranks issue collectives, and what each waits for first: finds those that wait for each other forever.

A collective ends when all its ranks have begun it, and a rank begins it when what its stream has waited for is over. So
collectives are the nodes of a graph, over all ranks: an edge leads from one to those that begin after it. A circle
hangs on NCCL, where also a send ends with its receive, and where the collectives of the same ranks run one by one. The
messages of a batch begin together, and what follows it begins after all of them.

Ranks that are threads share one ``IssueOrder``. Where values are needed to go on, a circle would hang here too: it is
found when the last of its ranks begins to wait.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from shoal.comm.protocol import Call
from shoal.errors import CommError
from shoal.simulation.accesses import place_of_call
from shoal.simulation.clocks import SimulatedStream

NodeKey = tuple[object, ...]
Needed = tuple[NodeKey, Collection[int]]  # a collective and the ranks that must have issued it
Shared = tuple[tuple[int, ...], int]  # ranks, and the number of their communicator: the streams that are one on NCCL
IssuedOn = dict[SimulatedStream, list[tuple[int, list[Needed], Shared]]]  # number in the stream, ...


@dataclass
class _Node:
    """A collective.

    Attributes: ``issued``: where each rank has issued it. ``after``: the collectives that end before it begins, with
    the rank on which they do.
    """

    name: str
    issued: dict[int, str] = field(default_factory=dict)
    after: dict[NodeKey, int] = field(default_factory=dict)


class IssueOrder:
    """What all ranks have issued."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[NodeKey, _Node] = {}
        self._waiting: dict[int, tuple[Sequence[Needed], str]] = {}  # by rank: as given to ``waiting``
        self._numbers: defaultdict[tuple[int, object], int] = defaultdict(int)

    def issue(self, rank: int, kind: tuple[object, ...], name: str, after: Iterable[NodeKey], place: str) -> NodeKey:
        """A rank issues the next collective of a kind (axis, ranks, direction), which all its ranks number alike.

        Args:
            after: the collectives that end before it begins.
        """
        with self._lock:
            number = self._numbers[rank, kind]
            self._numbers[rank, kind] += 1
            key = (*kind, number)
            node = self._nodes.setdefault(key, _Node(name))
            node.issued[rank] = place
            for each in after:
                node.after.setdefault(each, rank)
        return key

    @contextmanager
    def waiting(self, rank: int, needed: Sequence[Needed], place: str) -> Iterator[None]:
        """Inside the block, the host of ``rank`` waits for the values of a collective, or of a batch of messages.

        Raises: CommError: all of a circle of ranks wait for what the next one has not issued.
        """
        with self._lock:
            self._waiting[rank] = needed, place
            circle = self._circle_of_ranks(rank)
        if circle:
            with self._lock:
                lines = [self._said(each) for each in circle]
            raise CommError(
                "these ranks deadlock, each waiting for the next:" + "".join(lines),
                do="issue the collectives in one order on all ranks, or wait for each later.",
                code="comm-circle",
            )
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(rank, None)

    def _missing(self, rank: int) -> list[tuple[NodeKey, int]]:
        """What a rank waits for: collectives, each with a rank that has not issued it."""
        needed, _ = self._waiting.get(rank, ((), ""))
        return [(key, each) for key, ranks in needed for each in ranks if each not in self._nodes[key].issued]

    def _circle_of_ranks(self, start: int) -> list[int]:
        path: list[int] = []

        def visit(rank: int) -> bool:
            if rank in path:
                return rank == start
            path.append(rank)
            if any(visit(each) for _, each in self._missing(rank)):
                return True
            path.pop()
            return False

        return path if visit(start) else []

    def _said(self, rank: int) -> str:
        missing = self._missing(rank)
        ranks = ", ".join(str(each) for key, each in missing if key == missing[0][0])
        name, place = self._nodes[missing[0][0]].name, self._waiting[rank][1]
        return f"\n  rank {rank} waits for {name}, which rank {ranks} has not issued, at {place}"

    def circle(self) -> list[str]:
        """A circle of collectives, each of which begins on some rank after the one before: lines; empty: there is none.

        Its nodes are those that remain when whatever can begin has ended, one after the other.
        """
        with self._lock:
            open_ = {key: {each for each in node.after if each in self._nodes} for key, node in self._nodes.items()}
            followers: defaultdict[NodeKey, list[NodeKey]] = defaultdict(list)
            for key, before in open_.items():
                for each in before:
                    followers[each].append(key)
            ready = [key for key, before in open_.items() if not before]
            while ready:
                done = ready.pop()
                del open_[done]
                for key in followers[done]:
                    open_[key].discard(done)
                    if not open_[key]:
                        ready.append(key)
            if not open_:
                return []
            path = [next(iter(open_))]
            while (last := next(iter(open_[path[-1]]))) not in path:
                path.append(last)
            path = path[path.index(last) :]
            return [self._step(key, path[(at + 1) % len(path)]) for at, key in enumerate(path)]

    def _step(self, key: NodeKey, before: NodeKey) -> str:
        node = self._nodes[key]
        rank = node.after[before]
        first = self._nodes[before].issued.get(rank, "")
        return (
            f"\n  rank {rank}: {node.name} begins after {self._nodes[before].name}"
            f"\n    first: at {first}\n    then:  at {node.issued[rank]}"
        )


class Issues:
    """What one communicator of one rank issues.

    Args:
        issued: on all communicators of this rank.
        rank: along the axis.
        number: see ``World.communicator``.
    """

    def __init__(
        self,
        order: IssueOrder,
        issued: IssuedOn,
        stream: SimulatedStream,
        ranks: tuple[int, ...],
        rank: int,
        number: int = 0,
    ) -> None:
        self._order, self._issued, self._stream, self._ranks = order, issued, stream, ranks
        self._shared = ranks, number
        self._rank = ranks[rank]
        self._axis = stream.name
        self._mine = issued.setdefault(stream, [])

    def issue(self, call: Call, *, is_on_stream: bool) -> AbstractContextManager[None]:
        """Call when the stream has waited for what the call begins after, before it is logged on the stream.

        Returns: a block in which the host waits for the values.
        """
        place = place_of_call()
        after = list(self._before()) if is_on_stream else []
        issued: list[Needed] = []
        for one in call.messages or (call,):
            pair, needed, what = self._taking_part(one)
            kind = self._axis, *self._shared, *pair
            issued.append((self._order.issue(self._rank, kind, f"{what}, {self._axis}", after, place), needed))
        if is_on_stream:
            self._mine.append((self._stream.clock[self._stream] + 1, issued, self._shared))
        return self._order.waiting(self._rank, issued, place)

    def _taking_part(self, call: Call) -> tuple[tuple[int, ...], Collection[int], str]:
        """Of a message, sender and receiver; the ranks that must issue a call before it has values; its name."""
        peer = self._ranks[call.peer]
        if call.verb in ("send", "recv"):
            is_send = call.verb == "send"
            pair, needed = ((self._rank, peer), ()) if is_send else ((peer, self._rank), (peer,))
            return pair, needed, f"a message {call.label!r} from rank {pair[0]} to rank {pair[1]}"
        what = f"{call.verb} {call.label!r}"
        if call.verb == "broadcast":
            return (), () if peer == self._rank else (peer,), what
        return (), self._ranks, what

    def _before(self) -> Iterator[NodeKey]:
        """The last collective, or batch, of each stream that ends before the next one here begins."""
        clock = self._stream.clock
        for stream, calls in self._issued.items():
            for number, issued, shared in reversed(calls):
                # Communicators of the same ranks and number share a stream of NCCL.
                if shared == self._shared or number <= clock.get(stream, 0):
                    yield from (key for key, _ in issued)
                    break
