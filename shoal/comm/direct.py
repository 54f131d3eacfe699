"""Collectives among ranks that can read each other's memory: post where the source lies, then read the peers' directly.

Each rank numbers its calls on an axis: 0, 1, 2, ... A call goes through these steps, on every rank the same:

    issue   post (number, operation, label, numel, dtype, where my source lies); nothing is waited for
    first   once all peers have posted this number: compare their calls with mine, then
                reduce_scatter: out  = scale * sum over ranks of source[my range]
                all_gather:     full = every peer's source
                all_reduce:     my range of full = scale * sum; mark "reduced"
    second  all_reduce only, once all peers marked "reduced": copy every peer's range
    done    mark "done": I read nobody's memory any more. When all peers are done, my source may be overwritten.

No range is written while it is read: in the first step a peer reads only *its* range of my buffer, and I write mine.

A rank that waits for one call also carries on all others that are ready, on every axis. So works may be waited for in
any order, other than the peers' too, and no rank ever waits for another that waits for it.

Where posts and marks lie is the board's matter: objects of one process (``threads``) or shared memory (``shm``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from shoal.comm.board import Board, Call, Mark
from shoal.comm.finished import check_divides, gather_json, own_range
from shoal.comm.protocol import Work
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.errors import CommError

_LEAVE_SECONDS = 5.0  # what a rank that closes gives its peers to read its memory


class Stage(Enum):
    POSTED = 0
    REDUCED = 1
    FINISHED = 2


class DirectWork:
    """A call on a board: see the module."""

    __slots__ = ("_comm", "call", "first", "number", "result", "second", "seen", "stage")

    def __init__(
        self,
        comm: DirectCommunicator,
        number: int,
        call: Call,
        result: torch.Tensor,
        first: Callable[[list[torch.Tensor]], None],
        second: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self._comm = comm
        self.number = number
        self.call = call
        self.result = result
        self.first: Callable[[list[torch.Tensor]], None] | None = first
        self.second = second
        self.seen = 0  # peers 0 .. seen - 1 have come to the step that this work waits for
        self.stage = Stage.POSTED

    def wait(self) -> torch.Tensor:
        if self.stage is not Stage.FINISHED:
            self._comm.finish(self)
        return self.result

    def drain(self) -> None:
        self.wait()
        self._comm.await_readers(self)

    @property
    def comm(self) -> DirectCommunicator:
        return self._comm


class Pending:
    """The unfinished works of one rank, over all its axes, in the order of issue."""

    def __init__(self) -> None:
        self.works: dict[DirectWork, None] = {}

    def advance(self, waited: DirectWork | None = None) -> bool:
        """Carry on what is ready, the work waited for first. Returns: was there anything?"""
        if waited is not None and waited.stage is not Stage.FINISHED and waited.comm.advance(waited):
            return True
        # In the order of issue: of two works that add to one tensor, the earlier goes first.
        return any(work is not waited and work.comm.advance(work) for work in list(self.works))


class DirectCommunicator:
    """The ranks along one axis, over a board. Belongs to one thread of this rank."""

    def __init__(self, axis: str, board: Board, pending: Pending) -> None:
        self.axis = axis
        self.rank = board.rank
        self.size = board.size
        self._board = board
        self._pending = pending
        self._sum = RankOrderedSum()
        self._next = 0
        # What peers may still read, oldest first: it must neither be freed nor reused.
        self._read: deque[tuple[DirectWork, torch.Tensor]] = deque()
        self._is_closed = False

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self._board.empty(numel, dtype)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        check_divides("all_gather", full, shard, self.size, label=label)
        own = own_range(full, self.rank, self.size)
        source = own if shard is None else shard

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, piece in enumerate(sources):
                target = own_range(full, peer, self.size)
                if peer != self.rank:
                    target.copy_(piece)
                elif shard is not None and not is_same_memory(target, shard):
                    target.copy_(shard)

        return self._issue("all_gather", label, full, source, full, copy)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        check_divides("reduce_scatter", full, out, self.size, label=label)

        def reduce(sources: list[torch.Tensor]) -> None:
            sources[self.rank] = full
            pieces = [own_range(source, self.rank, self.size) for source in sources]
            self._sum(pieces, out, scale=scale, accumulate=accumulate)

        return self._issue("reduce_scatter", label, full, full, out, reduce)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        own = own_range(full, self.rank, self.size)
        source = self._board.readable(full)

        def reduce(sources: list[torch.Tensor]) -> None:
            pieces = [own_range(piece, self.rank, self.size) for piece in sources]
            self._sum(pieces, own_range(source, self.rank, self.size), scale=scale)

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, piece in enumerate(sources):
                if peer != self.rank:
                    own_range(full, peer, self.size).copy_(own_range(piece, peer, self.size))
            if source is not full:
                own.copy_(own_range(source, self.rank, self.size))

        return self._issue("all_reduce", label, full, source, full, reduce, copy)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        nothing = tensor[:0]

        def copy(sources: list[torch.Tensor]) -> None:
            if self.rank != source:
                tensor.copy_(sources[source])

        return self._issue(
            "broadcast", label, tensor, tensor if self.rank == source else nothing, tensor, copy, root=source
        )

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        result = vector.new_empty(self.size, vector.numel())
        snapshot = vector.detach().clone()

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, piece in enumerate(sources):
                result[peer].copy_(piece)

        return self._issue("exchange", label, vector, snapshot, result, copy)

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return gather_json(value, lambda vector: self.exchange(vector, label=label).wait(), torch.device("cpu"))

    def barrier(self, *, label: str) -> None:
        empty = torch.empty(0)
        self._issue("barrier", label, empty, empty, empty, lambda sources: None).wait()

    def drain(self) -> None:
        for work, _ in list(self._read):
            if work.stage is Stage.FINISHED:
                self.await_readers(work)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._board.must_drain_to_close:
            self._await_last_readers()
        for work in [work for work in self._pending.works if work.comm is self]:
            del self._pending.works[work]
        self._board.close()
        self._read.clear()

    def _await_last_readers(self) -> None:
        """Let peers finish what they still read; not for long, and not if anything is wrong."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        attempt = 0
        try:
            for work, _ in list(self._read):
                while work.stage is Stage.FINISHED and not self._is_read(work) and time.monotonic() < deadline:
                    if not self._pending.advance():
                        self._board.check(())
                        self._board.pause(self._board.ticket(), attempt)
                        attempt += 1
        except CommError:
            return

    # --- the steps of a work ---

    def _issue(
        self,
        op: str,
        label: str,
        what: torch.Tensor,
        source: torch.Tensor,
        result: torch.Tensor,
        first: Callable[[list[torch.Tensor]], None],
        second: Callable[[list[torch.Tensor]], None] | None = None,
        root: int = -1,
    ) -> DirectWork:
        if self._is_closed:
            raise CommError(
                f"{op} {label!r} on axis {self.axis!r}: the communicator is closed",
                do="issue no collective after close().",
            )
        number = self._next
        self._next += 1
        call = Call(op, label, what.numel(), what.dtype, root)
        source = self._board.readable(source.detach())
        work = DirectWork(self, number, call, result, first, second)
        self._forget_read()
        if len(self._read) >= self._board.capacity:
            self._free_slot()
        self._board.post(number, call, source)
        self._read.append((work, source))
        self._pending.works[work] = None
        return work

    def advance(self, work: DirectWork) -> bool:
        """Do the next step of ``work`` if the peers are ready for it. Returns: was there one?"""
        board = self._board
        number = work.number
        if work.stage is Stage.POSTED:
            while work.seen < self.size:
                if not board.has_posted(work.seen, number):
                    return False
                work.seen += 1
            self._compare(work)
            assert work.first is not None
            with torch.no_grad():
                work.first([board.source(peer, number, work.call.dtype) for peer in range(self.size)])
            work.first = None
            work.seen = 0
            if work.second is not None:
                work.stage = Stage.REDUCED
                board.mark(number, Mark.REDUCED)
                return True
        else:
            while work.seen < self.size:
                if not board.has_marked(work.seen, number, Mark.REDUCED):
                    return False
                work.seen += 1
            assert work.second is not None
            with torch.no_grad():
                work.second([board.source(peer, number, work.call.dtype) for peer in range(self.size)])
            work.second = None
        work.stage = Stage.FINISHED
        del self._pending.works[work]
        board.mark(number, Mark.DONE)
        return True

    def finish(self, work: DirectWork) -> None:
        """Carry on until ``work`` is finished."""
        self._carry_on(
            work,
            lambda: work.stage is Stage.FINISHED,
            lambda: [
                peer
                for peer in range(self.size)
                if not (
                    self._board.has_posted(peer, work.number)
                    if work.stage is Stage.POSTED
                    else self._board.has_marked(peer, work.number, Mark.REDUCED)
                )
            ],
        )

    def await_readers(self, work: DirectWork) -> None:
        """Carry on until no peer reads ``work``'s source any more."""
        self._carry_on(work, lambda: self._is_read(work), list)
        self._forget_read()

    def _is_read(self, work: DirectWork) -> bool:
        return all(
            self._board.has_marked(peer, work.number, Mark.DONE) or self._board.has_left(peer)
            for peer in range(self.size)
        )

    def _forget_read(self) -> None:
        while self._read and self._is_read_by_marks(self._read[0][0]):
            self._read.popleft()

    def _is_read_by_marks(self, work: DirectWork) -> bool:
        return work.stage is Stage.FINISHED and all(
            self._board.has_marked(peer, work.number, Mark.DONE) for peer in range(self.size)
        )

    def _free_slot(self) -> None:
        """The board is full: carry on until the oldest call on it is done everywhere."""
        oldest, _ = self._read[0]
        self.finish(oldest)
        self.await_readers(oldest)
        while self._read and self._read[0][0].number <= oldest.number:
            self._read.popleft()

    def _carry_on(self, work: DirectWork, is_done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        board = self._board
        attempt = 0
        deadline = 0.0
        while True:
            ticket = board.ticket()
            if is_done():
                return
            if self._pending.advance(work):
                attempt = 0
                continue
            if is_done():
                return
            if attempt == 0:
                deadline = time.monotonic() + board.timeout
            elif attempt % 16 == 0 and time.monotonic() > deadline:
                raise self._timeout(work, missing())
            board.check(missing() if attempt % 16 == 8 else ())
            board.pause(ticket, attempt)
            attempt += 1

    def _compare(self, work: DirectWork) -> None:
        for peer in range(self.size):
            theirs = None if peer == self.rank else self._board.mismatch(peer, work.number, work.call)
            if theirs is not None:
                raise CommError(
                    f"the ranks of axis {self.axis!r} disagree about call {work.number}: rank {self.rank} on the axis "
                    f"issued {work.call}, rank {peer} issued {theirs}",
                    do="make every rank issue the same collectives in the same order; look for a branch that depends "
                    "on the rank or on the data.",
                    code="comm-mismatch",
                )

    def _timeout(self, work: DirectWork, missing: list[int]) -> CommError:
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self._board.last_calls()))
        waited_for = (
            f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}" if missing else "its peers to read it"
        )
        return CommError(
            f"rank {self.rank} on axis {self.axis!r} waited {self._board.timeout:g} s in {work.call} "
            f"(call {work.number}) for {waited_for}. Last issued on this axis: {lines}",
            do="see what the ranks that are behind were doing; if they were slow, give init_distributed more time.",
            code="comm-timeout",
        )
