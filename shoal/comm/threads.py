"""Ranks as threads of one process: real collectives in a test that takes milliseconds.

    results = run_ranks(4, train, "arguments")  # train("arguments") on four threads, each with its own current_world()

Sums and copies are those of ranks in processes, to the bit. The ranks share the process: they have one set of random
generators, and Python runs one of them at a time.

They may share one accelerator too, which NCCL's ranks cannot. A posted source comes with an event, which its readers'
streams wait for. The ranks compute in one stream, the default one, so what a rank overwrites after it was read needs no
event.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shoal.comm.direct import DirectCommunicator, Pending
from shoal.comm.failure import FirstError
from shoal.comm.memory_group import GroupCall, Mark
from shoal.comm.protocol import Backend
from shoal.comm.world import World, use_world
from shoal.errors import CommError, RankFailedError, UsageError
from shoal.streams import streams_of

T = TypeVar("T")


class _CallRecord:
    """One call of a group: what each rank posted, and how far each rank is."""

    __slots__ = ("calls", "marks", "num_posted", "ready", "sources")

    def __init__(self, size: int) -> None:
        self.calls: list[GroupCall | None] = [None] * size
        self.sources: list[torch.Tensor | None] = [None] * size
        self.ready: list[Any] = [None] * size  # events after which an accelerator's source may be read
        self.marks = (bytearray(size), bytearray(size))  # by Mark
        self.num_posted = 0


class _SharedGroup:
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.rounds: dict[int, _CallRecord] = {}
        self.last: list[GroupCall | None] = [None] * len(ranks)
        self.num_issued = [0] * len(ranks)


class ThreadWorld:
    """What the ranks of one ``run_ranks`` share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.lock = threading.RLock()
        self.changed = [threading.Condition(self.lock) for _ in range(size)]  # by the rank that waits
        self.generations = [0] * size
        self.failure: tuple[int, str] | None = None  # rank, traceback
        self.error: BaseException | None = None
        self.left: set[int] = set()  # ranks whose function has returned
        self.groups: dict[tuple[str, tuple[int, ...], str], _SharedGroup] = {}
        self.shared: dict[str, Any] = {}  # ``World.shared``

    def group(self, axis: str, ranks: tuple[int, ...], name: str) -> _SharedGroup:
        with self.lock:
            return self.groups.setdefault((axis, ranks, name), _SharedGroup(ranks))

    def notify(self, ranks: Sequence[int] | None = None) -> None:
        """Wake ``ranks``, by default all, to look whether what they wait for is there."""
        with self.lock:
            for rank in range(self.size) if ranks is None else ranks:
                self.generations[rank] += 1
                self.changed[rank].notify_all()

    def fail(self, rank: int, text: str, error: BaseException | None = None) -> None:
        """The first failure counts; the others are its consequences."""
        with self.lock:
            if self.failure is None:
                self.failure = (rank, text)
                self.error = error
            self.notify()

    def last_calls(self, rank: int) -> str:
        """What ``rank`` issued last on each axis."""
        texts = [
            f"call {group.num_issued[at] - 1} on {axis!r}, {group.last[at]}"
            for (axis, ranks, _), group in list(self.groups.items())
            if rank in ranks and group.last[(at := ranks.index(rank))] is not None
        ]
        return "; ".join(texts) or "nothing"


class ThreadGroup:
    """One rank's view of its group.

    Args:
        name: distinguishes this group from others of the same axis and ranks.
    """

    capacity = 1 << 30
    must_drain_to_close = False  # a tensor lives as long as any rank has a reference

    def __init__(self, world: ThreadWorld, axis: str, ranks: tuple[int, ...], name: str, rank: int) -> None:
        group = world.group(axis, ranks, name)
        self.rank = group.ranks.index(rank)
        self._world_rank = rank
        self.size = len(group.ranks)
        self.timeout = world.timeout
        self._world = world
        self._group = group
        self._axis = axis
        self._name = name

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def readable(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def channel(self, source: int, target: int) -> ThreadGroup:
        ranks = self._group.ranks
        pair = ranks[source], ranks[target]
        return ThreadGroup(self._world, self._axis, pair, f"{self._name} channel", ranks[self.rank])

    def post(self, number: int, call: GroupCall, source: torch.Tensor) -> None:
        group = self._group
        with self._world.lock:
            calls = group.rounds.get(number)
            if calls is None:
                calls = group.rounds[number] = _CallRecord(self.size)
            calls.sources[self.rank] = source
            calls.ready[self.rank] = _recorded(source.device)
            calls.calls[self.rank] = call
            group.last[self.rank] = call
            group.num_issued[self.rank] = number + 1
            calls.num_posted += 1
            if calls.num_posted == self.size:  # a rank waits for all of its peers, so the others need not wake it
                self._world.notify(group.ranks)

    def has_posted(self, peer: int, number: int) -> bool:
        calls = self._group.rounds.get(number)
        return calls is not None and calls.calls[peer] is not None

    def mismatch(self, peer: int, number: int, call: GroupCall) -> str | None:
        theirs = self._group.rounds[number].calls[peer]
        return None if theirs == call else str(theirs)

    def source(self, peer: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        calls = self._group.rounds[number]
        source, ready = calls.sources[peer], calls.ready[peer]
        assert source is not None
        if ready is not None and (streams := streams_of(source.device)) is not None:
            streams.current().wait_event(ready)
        return source

    def mark(self, number: int, mark: Mark) -> None:
        with self._world.lock:
            calls = self._group.rounds[number]
            marks = calls.marks[mark.value]
            marks[self.rank] = 1
            source = calls.sources[self.rank]
            if mark is Mark.REDUCED and source is not None:
                calls.ready[self.rank] = _recorded(source.device)
            if sum(marks) == self.size:
                if mark is Mark.DONE:
                    del self._group.rounds[number]
                self._world.notify(self._group.ranks)

    def has_marked(self, peer: int, number: int, mark: Mark) -> bool:
        calls = self._group.rounds.get(number)
        return calls is None or calls.marks[mark.value][peer] == 1  # a round is forgotten once all ranks are done

    def ticket(self) -> int:
        return self._world.generations[self._world_rank]

    def pause(self, ticket: int, attempt: int) -> None:
        with self._world.lock:
            if self._world.generations[self._world_rank] == ticket:
                self._world.changed[self._world_rank].wait(0.02)

    def check(self, missing: Sequence[int]) -> None:
        if self._world.failure is not None:
            raise RankFailedError(*self._world.failure)
        for peer in missing:
            rank = self._group.ranks[peer]
            if rank in self._world.left:
                raise CommError(
                    f"rank {rank} has returned from its function, and this rank still waits for it in a collective. "
                    f"Last issued by rank {rank}: {self._world.last_calls(rank)}",
                    do="make every rank issue the same collectives.",
                    code="comm-mismatch",
                )

    def has_left(self, peer: int) -> bool:
        return self._group.ranks[peer] in self._world.left

    def last_calls(self) -> list[str]:
        return [
            "nothing" if call is None else f"{call} (call {number - 1})"
            for call, number in zip(self._group.last, self._group.num_issued, strict=True)
        ]

    def close(self) -> None:
        return None


class ThreadTransport:
    """Opens communicators for a rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._first_error = FirstError()
        self._pending = Pending(self._first_error)
        self._opened: dict[tuple[str, tuple[int, ...]], int] = {}

    def open(
        self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None = None, number: int = 0
    ) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        # An axis that was closed and is opened again starts with an empty group.
        generation = self._opened[axis, ranks] = self._opened.get((axis, ranks), -1) + 1
        group = ThreadGroup(self._world, axis, ranks, str(generation), self._rank)
        return DirectCommunicator(axis, group, self._pending)

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        self._world.fail(rank, text, error)
        self._first_error.keep(RankFailedError(rank, text))

    def close(self) -> None:
        return None


def _recorded(device: torch.device) -> Any:
    """An event after what the current stream of an accelerator has queued; None for a CPU, also a simulated one."""
    streams = streams_of(device) if device.type != "cpu" else None
    if streams is None:
        return None
    event = streams.event()
    event.record(streams.current())
    return event


def run_ranks(
    size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 60,
    wait_timeout: float | None = None,
    device: torch.device | None = None,
) -> list[T]:
    """Run ``fn(*args)`` on ``size`` ranks that are threads; each finds its world by ``current_world()``.

    Args:
        device: of all ranks; None: the CPU. On an accelerator each rank's backward pass runs in the rank's own thread:
            autograd has one thread for all passes on a device, where one rank would wait for another for ever.
        timeout: seconds for the whole run.
        wait_timeout: seconds without progress after which a collective raises; None: as ``timeout``.

    Returns: what each rank returned, in rank order.
    Raises: what the first rank to fail raised (the others stop at their next collective); CommError: the ranks were not
        done within ``timeout``; it says what each rank issued last.
    """
    if size < 1:
        raise UsageError(f"run_ranks was asked for {size} ranks", do="ask for 1 or more.")
    shared = ThreadWorld(size, timeout if wait_timeout is None else wait_timeout)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        world = World(rank, size, rank, device or torch.device("cpu"), "threads", ThreadTransport(shared, rank))
        world.shared = shared.shared
        try:
            if world.device.type != "cpu" and world.device.index is not None:
                torch.accelerator.set_device_index(world.device.index)
            with use_world(world), torch.autograd.set_multithreading_enabled(world.device.type == "cpu"):
                results[rank] = fn(*args)
            world.close()
        except BaseException as error:  # a RankFailedError: another rank has failed first, and is known already
            shared.fail(rank, traceback.format_exc(), error)
            world.write_trace()
        finally:
            shared.left.add(rank)
            shared.notify()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        late = [rank for rank in range(size) if threads[rank].is_alive()]
        lines = "".join(f"\n    rank {rank}: {shared.last_calls(rank)}" for rank in range(size))
        error = CommError(
            f"ranks {late} of {size} were not done after {timeout:g} s. Last issued:{lines}",
            do="check what the late ranks were doing.",
            code="comm-timeout",
        )
        shared.fail(late[0], str(error), error)
        for thread in threads:
            thread.join(1.0)  # those that wait in a collective end now; one stuck elsewhere cannot be ended
    if shared.error is not None:
        raise shared.error
    return results
