"""Collectives among ranks that can read each other's memory: post where the source lies, then read the peers' directly.

Each rank numbers its calls on an axis: 0, 1, 2, ... A call goes through these steps, on every rank the same:

    issue   post (number, operation, label, numel, dtype, where my source lies); does not block
    first   once all peers have posted this number: compare their calls with mine, then
                reduce_scatter: out  = scale * sum over ranks of source[my range]
                all_gather:     full = every peer's source
                all_to_all:     out  = every peer's part for me
                all_reduce:     my range of full = scale * sum; mark "reduced"
    second  all_reduce only, once all peers marked "reduced": copy every peer's range
    done    mark "done": I read no peer's memory any more. When all peers are done, my source may be overwritten.

A send is a call on a group of two, with numbers of its own: the sender posts and is done; the receiver copies.

No range is written while it is read: in the first step a peer reads only *its* range of my buffer, and I write mine.

A rank that waits for one call also advances all others that are ready, on every axis. So ranks may wait for their works
in different orders without a deadlock.

After the first error (a rank failed, a time-out, calls that differ) every further wait raises it at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from shoal.comm.failure import FirstError
from shoal.comm.memory_group import GroupCall, Mark, MemoryGroup
from shoal.comm.protocol import (
    Backend,
    Call,
    FinishedWork,
    Verbs,
    Work,
    calls_differ,
    closed_error,
    exchange_of,
    own_range,
    split_mismatch,
    split_parts,
)
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.comm.waiting import LongWait
from shoal.errors import CommError

_LEAVE_SECONDS = 5.0  # for which close() waits for peers that still read this rank's memory


class Stage(Enum):
    POSTED = 0
    REDUCED = 1
    FINISHED = 2


class DirectWork:
    """One call: see the module."""

    __slots__ = ("call", "comm", "first", "is_private", "number", "result", "second", "seen", "stage")

    def __init__(
        self,
        comm: DirectCommunicator,
        number: int,
        call: GroupCall,
        result: torch.Tensor,
        first: Callable[[list[torch.Tensor]], None] | None,
        second: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self.comm = comm
        self.number = number
        self.call = call
        self.result = result
        self.first = first
        self.second = second
        self.is_private = False  # peers read a copy, which the communicator keeps: the caller may overwrite its tensor
        self.seen = 0  # peers 0 .. seen - 1 have reached the step that this work waits for
        self.stage = Stage.POSTED

    def wait(self) -> torch.Tensor:
        if self.stage is not Stage.FINISHED:
            self.comm.finish(self)
        return self.result

    def drain(self) -> None:
        self.wait()
        if not self.is_private:
            self.comm.await_readers(self)


class Pending:
    """The unfinished works of one rank, over all its axes, in the order of issue."""

    def __init__(self, first_error: FirstError) -> None:
        self.works: dict[DirectWork, None] = {}
        self.first_error = first_error

    def advance(self, waited: DirectWork | None = None) -> bool:
        """Do the next step of a work that is ready, preferably of ``waited``. Returns: True if there was one."""
        if waited is not None and waited.stage is not Stage.FINISHED and waited.comm.advance(waited):
            return True
        # In the order of issue: of two works that add to one tensor, the earlier goes first.
        return any(work is not waited and work.comm.advance(work) for work in list(self.works))


class DirectCommunicator(Backend):
    """The ranks along one axis that can read each other's memory. Used by one thread of this rank.

    Args:
        coordinates: of the group's ranks on the axis, for messages; None: 0, 1, 2, ...
    """

    def __init__(
        self, axis: str, group: MemoryGroup, pending: Pending, coordinates: Sequence[int] | None = None
    ) -> None:
        super().__init__(axis, group.rank, group.size)
        self._group = group
        self._coordinates = range(group.size) if coordinates is None else coordinates
        self._channels: dict[tuple[int, int], DirectCommunicator] = {}  # by coordinates of sender and receiver
        self._pending = pending
        self._sum = RankOrderedSum()
        self._next = 0
        # Sources that peers may still read, oldest first: they must be neither freed nor reused.
        self._read: deque[tuple[DirectWork, torch.Tensor]] = deque()
        self._is_closed = False

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self._group.empty(numel, dtype)

    def _all_gather(self, call: Call) -> Work:
        full, shard = call.result, call.sent

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, part in enumerate(sources):
                target = own_range(full, peer, self.size)
                if peer != self.rank:
                    target.copy_(part)
                elif not is_same_memory(target, shard):
                    target.copy_(shard)

        return self._post(call, full, shard, copy)

    def _reduce_scatter(self, call: Call) -> Work:
        full = call.sent

        def reduce(sources: list[torch.Tensor]) -> None:
            sources[self.rank] = full
            parts = [own_range(source, self.rank, self.size) for source in sources]
            self._sum(parts, call.result, scale=call.scale, accumulate=call.accumulate)

        return self._post(call, full, full, reduce)

    def _all_reduce(self, call: Call) -> Work:
        full = call.result
        own = own_range(full, self.rank, self.size)
        source = self._group.readable(full)

        def reduce(sources: list[torch.Tensor]) -> None:
            parts = [own_range(part, self.rank, self.size) for part in sources]
            self._sum(parts, own_range(source, self.rank, self.size), scale=call.scale)

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, part in enumerate(sources):
                if peer != self.rank:
                    own_range(full, peer, self.size).copy_(own_range(part, peer, self.size))
            if source is not full:
                own.copy_(own_range(source, self.rank, self.size))

        return self._post(call, full, source, reduce, copy)

    def _all_to_all(self, call: Call) -> Work:
        parts = split_parts(call.result, call.out_splits, self.size)
        if call.source_splits is None:
            counts: Work = FinishedWork(
                torch.full((self.size, self.size), call.sent.numel() // self.size, dtype=torch.int64, device="cpu")
            )
        else:
            sizes = torch.tensor(call.source_splits, dtype=torch.int64, device="cpu")
            counts = self._exchange(exchange_of(sizes, self.size, call.label))

        def copy(sources: list[torch.Tensor]) -> None:
            # All peers posted their split sizes before this call, so wait() does not block here.
            sizes = counts.wait()
            starts = (sizes.cumsum(1) - sizes)[:, self.rank].tolist()
            for peer, (start, numel) in enumerate(zip(starts, sizes[:, self.rank].tolist(), strict=True)):
                if numel != parts[peer].numel():
                    raise split_mismatch(self.axis, call.label, self.rank, peer, numel, parts[peer].numel())
                parts[peer].copy_(sources[peer][start : start + numel])

        what = call.result if call.out_splits is None else call.result[:0]
        return self._post(call, what, call.sent, copy)

    def _send(self, call: Call) -> Work:
        return self._channel(self.rank, call.peer)._post(call, call.result, call.result, None)

    def _recv(self, call: Call) -> Work:
        tensor = call.result

        def copy(sources: list[torch.Tensor]) -> None:
            tensor.copy_(sources[0])

        return self._channel(call.peer, self.rank)._post(call, tensor, tensor[:0], copy)

    def _broadcast(self, call: Call) -> Work:
        tensor, source = call.result, call.peer

        def copy(sources: list[torch.Tensor]) -> None:
            if self.rank != source:
                tensor.copy_(sources[source])

        return self._post(call, tensor, tensor if self.rank == source else tensor[:0], copy, root=source)

    def _exchange(self, call: Call) -> Work:
        result = call.result

        def copy(sources: list[torch.Tensor]) -> None:
            for peer, part in enumerate(sources):
                result[peer].copy_(part)

        return self._post(call, call.sent, call.sent.detach().clone(), copy)

    verbs: ClassVar[Verbs] = {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "send": _send,
        "recv": _recv,
        "broadcast": _broadcast,
        "exchange": _exchange,
    }

    def barrier(self, *, label: str) -> None:
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self._post(Call("barrier", label, empty), empty, empty, lambda sources: None).wait()

    def drain(self) -> None:
        for work, _ in list(self._read):
            if work.stage is Stage.FINISHED and not work.is_private:
                self.await_readers(work)
        self._forget_read()
        for channel in self._channels.values():
            channel.drain()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        if self._group.must_drain_to_close:
            self._await_last_readers()
        for work in [work for work in self._pending.works if work.comm is self]:
            del self._pending.works[work]
        self._group.close()
        self._read.clear()

    def _await_last_readers(self) -> None:
        """Wait for peers that still read this rank's memory, for at most ``_LEAVE_SECONDS``; not after an error."""
        if self._pending.first_error.error is not None:
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        attempt = 0
        try:
            for work, _ in list(self._read):
                while work.stage is Stage.FINISHED and not self._is_read(work) and time.monotonic() < deadline:
                    if not self._pending.advance():
                        self._group.check(())
                        self._group.pause(self._group.ticket(), attempt)
                        attempt += 1
        except CommError:
            return

    # --- the steps of a work ---

    def _post(
        self,
        call: Call,
        what: torch.Tensor,
        source: torch.Tensor,
        first: Callable[[list[torch.Tensor]], None] | None,
        second: Callable[[list[torch.Tensor]], None] | None = None,
        root: int = -1,
    ) -> DirectWork:
        """Post a call. Without ``first`` this rank has nothing to do but keep the source, and the work is finished.

        Args:
            what: its numel and dtype are compared with the peers'.
        """
        if self._is_closed:
            raise closed_error(self.axis, call.verb, call.label)
        number = self._next
        self._next += 1
        op = "send" if call.verb == "recv" else call.verb
        posted = GroupCall(op, call.label, what.numel(), what.dtype, root)
        own = source.detach()
        source = self._group.readable(own)
        work = DirectWork(self, number, posted, call.result, first, second)
        work.is_private = source is not own or op == "exchange"
        self._forget_read()
        if len(self._read) >= self._group.capacity:
            self._free_slot()
        self._group.post(number, posted, source)
        self._read.append((work, source))
        if first is None:
            work.stage = Stage.FINISHED
            self._group.mark(number, Mark.DONE)
        else:
            self._pending.works[work] = None
        return work

    def _channel(self, source: int, target: int) -> DirectCommunicator:
        result = self._channels.get((source, target))
        if result is None:
            group = self._group.channel(source, target)
            result = DirectCommunicator(self.axis, group, self._pending, (source, target))
            self._channels[source, target] = result
        return result

    def advance(self, work: DirectWork) -> bool:
        """Do the next step of ``work`` if its peers are ready for it. Returns: True if there was one."""
        group = self._group
        number = work.number
        if work.stage is Stage.POSTED:
            while work.seen < self.size:
                if not group.has_posted(work.seen, number):
                    return False
                work.seen += 1
            self._compare(work)
            assert work.first is not None
            with torch.no_grad(), _unrecorded():
                work.first([group.source(peer, number, work.call.dtype) for peer in range(self.size)])
            work.first = None
            work.seen = 0
            if work.second is not None:
                work.stage = Stage.REDUCED
                group.mark(number, Mark.REDUCED)
                return True
        else:
            while work.seen < self.size:
                if not group.has_marked(work.seen, number, Mark.REDUCED):
                    return False
                work.seen += 1
            assert work.second is not None
            with torch.no_grad(), _unrecorded():
                work.second([group.source(peer, number, work.call.dtype) for peer in range(self.size)])
            work.second = None
        work.stage = Stage.FINISHED
        del self._pending.works[work]
        group.mark(number, Mark.DONE)
        return True

    def finish(self, work: DirectWork) -> None:
        """Advance works until ``work`` is finished."""
        self._advance_until(
            work,
            lambda: work.stage is Stage.FINISHED,
            lambda: [
                peer
                for peer in range(self.size)
                if not (
                    self._group.has_posted(peer, work.number)
                    if work.stage is Stage.POSTED
                    else self._group.has_marked(peer, work.number, Mark.REDUCED)
                )
            ],
        )

    def await_readers(self, work: DirectWork) -> None:
        """Advance works until no peer reads ``work``'s source any more."""
        self._advance_until(work, lambda: self._is_read(work), list)
        self._forget_read()

    def _is_read(self, work: DirectWork) -> bool:
        return all(
            self._group.has_marked(peer, work.number, Mark.DONE) or self._group.has_left(peer)
            for peer in range(self.size)
        )

    def _forget_read(self) -> None:
        has_marked = self._group.has_marked
        while self._read:
            work = self._read[0][0]
            if work.stage is not Stage.FINISHED:
                return
            for peer in range(self.size):
                if peer != self.rank and not has_marked(peer, work.number, Mark.DONE):
                    return
            self._read.popleft()

    def _free_slot(self) -> None:
        """Every slot is in use: advance works until the oldest call is done on all ranks."""
        oldest, _ = self._read[0]
        self.finish(oldest)
        self.await_readers(oldest)
        while self._read and self._read[0][0].number <= oldest.number:
            self._read.popleft()

    def _advance_until(self, work: DirectWork, is_done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        if is_done():
            return
        self._pending.first_error.check()
        try:
            self._advance(work, is_done, missing)
        except CommError as error:
            self._pending.first_error.keep(error)
            raise

    def _advance(self, work: DirectWork, is_done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        group = self._group
        attempt = 0
        wait = LongWait()
        while True:
            ticket = group.ticket()
            if is_done():
                return
            if self._pending.advance(work):
                attempt = 0
                continue
            if is_done():
                return
            if attempt == 0:
                wait = LongWait()
            elif attempt % 16 == 0:
                if wait.seconds > group.timeout:
                    raise self._timeout(work, missing())
                if {*range(self.rank)} <= {*missing()}:  # of the ranks that wait in this call, the first one says so
                    wait.report(lambda waits: self._waiting(work, missing(), waits))
            group.check(missing() if attempt % 16 == 8 else ())
            group.pause(ticket, attempt)
            attempt += 1

    def _compare(self, work: DirectWork) -> None:
        for peer in range(self.size):
            theirs = None if peer == self.rank else self._group.mismatch(peer, work.number, work.call)
            if theirs is not None:
                mine, other = self._coordinates[self.rank], self._coordinates[peer]
                raise calls_differ(self.axis, f" about call {work.number}", ([mine], work.call), ([other], theirs))

    def _waiting(self, work: DirectWork, missing: list[int], waits: str) -> str:
        """A sentence on a wait: which rank waits where, for which ranks, and what every rank issued last."""
        calls = zip(self._coordinates, self._group.last_calls(), strict=True)
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in calls)
        ranks = [self._coordinates[peer] for peer in missing]
        waited_for = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}" if ranks else "its peers to read it"
        return (
            f"rank {self._coordinates[self.rank]} on axis {self.axis!r} {waits} in {work.call} (call {work.number}) for"
            f" {waited_for}. Last issued on this axis: {lines}"
        )

    def _timeout(self, work: DirectWork, missing: list[int]) -> CommError:
        return CommError(
            self._waiting(work, missing, f"waited {self._group.timeout:g} s"),
            do="see what the ranks that are behind were doing; if they were slow, give init_distributed more time.",
            code="comm-timeout",
        )


def _unrecorded() -> AbstractContextManager[object]:
    """Inside the block ``torch.utils.checkpoint`` does not see operators.

    A policy takes what a function does by its order, and which call does a step depends on when the peers are ready.
    """
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    modules = {type(mode).__module__ for mode in _get_current_dispatch_mode_stack()}
    return _disable_current_modes() if "torch.utils.checkpoint" in modules else nullcontext()
