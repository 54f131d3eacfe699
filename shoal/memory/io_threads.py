"""A few threads that read and write files, as if the operations on one file ran one after another.

    submit    wait while too many operations are unfinished. Then hold the operation back behind the earlier ones that
              touch the same bytes, if it or they write.
    begin     nothing holds it back: a thread calls ``begin()``, which opens the file and cuts the work into parts.
    parts    any thread takes any part. After a failure the rest of that operation's parts are skipped.
    end       the last part is done: ``end()`` closes the file; what waited for it goes on; the ticket is done.

No thread ever waits for another operation, so operations cannot wait in a circle.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shoal.errors import TierError, UsageError
from shoal.memory.host import aligned_empty

Part = Callable[[torch.Tensor], None]  # run by a thread, which passes its own bounce buffer


class Operation(Protocol):
    """A read or write of one range of one file. The range is what orders it among others."""

    key: object  # operations of other keys never touch the same bytes
    start: int
    stop: int
    is_write: bool

    def begin(self) -> Sequence[Part]: ...

    def end(self, error: BaseException | None) -> None:
        """Called once, also where ``begin`` or a part raised ``error``, or where it never began."""


class Ticket:
    """The promise of one operation. Whoever drops a ticket of a write learns of its failure from the next read."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.on_waited: Callable[[], None] | None = None  # called by the thread that has waited

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return once the operation is done.

        Raises: TierError, OutOfMemoryError, UsageError: it failed; raised by every call. TierError: it is not done
            after ``timeout_seconds``.
        Order: blocks the host.
        """
        if not self._done.wait(timeout_seconds):
            raise TierError(
                f"a read or write did not finish within {timeout_seconds:g} seconds.",
                do="look at the system's log (dmesg) for the device.",
                code="tier-stuck",
            )
        if self.on_waited is not None:
            self.on_waited()
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()


class _Job:
    """An operation on its way through the threads."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.ticket = Ticket()
        self.error: BaseException | None = None
        self.num_ahead = 0
        self.behind: list[_Job] = []
        self.num_parts_left = 0

    def holds_back(self, later: Operation) -> bool:
        mine = self.operation
        return (mine.is_write or later.is_write) and mine.start < later.stop and later.start < mine.stop


class IoThreads:
    """The threads and their queue.

    Args:
        bounce_nbytes: of the page-aligned buffer that each thread owns.
        max_pending: operations that may be unfinished before ``submit`` makes its caller wait.

    Memory: ``num_threads * bounce_nbytes`` on the host until ``close()``; of each operation, what it refers to.
    """

    def __init__(self, num_threads: int, *, name: str, bounce_nbytes: int, max_pending: int) -> None:
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[tuple[_Job, Part | None]] = deque()  # None: begin
        self._pending: defaultdict[object, list[_Job]] = defaultdict(list)
        self._num_pending = 0
        self._max_pending = max_pending
        self._is_closed = False
        self._pid = os.getpid()
        buffers = [aligned_empty(bounce_nbytes, is_inherited=False) for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(buffer,), name=f"{name}-{index}", daemon=True)
            for index, buffer in enumerate(buffers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system has no more threads
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close()
            raise

    def submit(self, operation: Operation) -> Ticket:
        """Queue an operation behind the earlier ones that it depends on.

        Raises: UsageError: the threads are closed.
        Order: blocks the host only while ``max_pending`` operations are unfinished.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "the disk tier's threads are in the process that this one was forked from.",
                do="read and write in the training process, not in a data worker.",
                code="tier-forked",
            )
        job = _Job(operation)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_pending < self._max_pending)
            if self._is_closed:
                raise _closed()
            for earlier in self._pending[operation.key]:
                if earlier.holds_back(operation):
                    earlier.behind.append(job)
                    job.num_ahead += 1
            self._pending[operation.key].append(job)
            self._num_pending += 1
            if not job.num_ahead:
                self._queue.append((job, None))
                self._changed.notify_all()
        return job.ticket

    def wait_idle(self, key: object = None) -> None:
        """Wait until nothing is pending: of ``key``, or at all. The tickets raise the errors.

        Order: blocks the host.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._num_pending if key is None else self._pending.get(key)))

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Finish the parts that run, fail what has not begun, and end the threads. Idempotent.

        A thread that a dead device holds is left behind after ``timeout_seconds``; it is a daemon.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_seconds)
        is_stuck = any(thread.is_alive() for thread in self._threads)
        with self._changed:
            left = [job for jobs in self._pending.values() for job in jobs]
            self._pending.clear()
            self._queue.clear()
            self._num_pending = 0
            self._changed.notify_all()
        for job in left:
            error = job.error or _closed()
            if not is_stuck:  # the thread that is left may still use the file's number, which must not be another's
                job.operation.end(error)
            job.ticket.finish(error)

    def _run(self, bounce: torch.Tensor) -> None:
        while self._run_one(bounce):
            pass

    def _run_one(self, bounce: torch.Tensor) -> bool:
        # In a call of its own, so that a thread that waits refers to no operation, and so to no one's memory.
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._queue))
            if self._is_closed:
                return False
            job, part = self._queue.popleft()
        parts: Sequence[Part] = ()
        try:
            if part is None:
                parts = job.operation.begin()
            elif job.error is None:
                part(bounce)
        except BaseException as error:
            job.error = job.error or error
        with self._changed:
            job.num_parts_left += len(parts) if part is None else -1
            if job.num_parts_left:
                if parts:
                    self._queue.extendleft((job, entry) for entry in reversed(parts))  # before what came later
                    self._changed.notify_all()
                return True
        self._finish(job)
        return True

    def _finish(self, job: _Job) -> None:
        try:
            job.operation.end(job.error)
        except BaseException as error:
            job.error = job.error or error
        with self._changed:
            jobs = self._pending.get(job.operation.key, [])
            if job not in jobs:
                return  # close() gave up on this thread and has finished the ticket
            jobs.remove(job)
            if not jobs:
                del self._pending[job.operation.key]
            self._num_pending -= 1
            job.ticket.finish(job.error)
            for later in job.behind:
                later.num_ahead -= 1
                if not later.num_ahead:
                    self._queue.append((later, None))
            self._changed.notify_all()


def _closed() -> UsageError:
    return UsageError(
        "the disk tier is closed.",
        do="finish reading and writing before the engine is closed.",
        code="tier-closed",
    )
