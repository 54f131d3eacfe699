"""One rank's failure, reported to all: the first traceback goes to the store, where every other rank looks for it.

1  failing rank    its exception reaches ``World.report_failure`` (from the engine, or the excepthook below)
2  failing rank    writes rank and traceback to the store (the first report stays) and to shared memory, and closes its
                   Gloo connections
3  other ranks     over shared memory: the flag wakes a rank that waits; over Gloo: the connection is closed;
                   over NCCL: a thread polls the store and aborts the groups
   killed rank     reports nothing; over NCCL the rank before it does, whose connection to it was closed. Over Gloo each
                   rank that lost a connection notes that in the store before it closes its own. One of the killed
                   rank's machine sees that its process has ended without a note, and reports it; or, where it was
                   alone there, one whose other peers on the axis all have noted it
4  other ranks     look the traceback up, raise RankFailedError with it, and report it in turn
5  rank 0          whose process has the store, waits until all have read the report, or for two seconds
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import ClassVar

from torch._C._distributed_c10d import Store

from shoal.comm.environment import wants_tracebacks
from shoal.comm.interface import address_of, own_address
from shoal.errors import CommError, RankFailedError, ShoalError
from shoal.hang import RankProcesses
from shoal.text import clip

LOOK_UP_SECONDS = 5.0
_SILENT_PEER_SECONDS = 1.5  # after which the one peer that has noted nothing is taken to have failed

_SHARDED_WRITE = (
    "shoal: between two uses a parameter that is sharded at stage 3 has no memory to write to. Change it inside"
    " `with shoal.zero.GatheredParameters([p], modifier_rank=0):`; for a state_dict,"
    " engine.load_module_state_dict(state_dict)."
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
_LINGER_SECONDS = 2.0
_KEY = "failure"
_SEEN = "seen"
_LOST = "lost"


class FirstError:
    """The error after which a rank's communicators are unusable: every further wait raises it at once.

    So a hang is reported after one time-out, however many works are under way.
    """

    def __init__(self) -> None:
        self.error: CommError | None = None

    def keep(self, error: CommError) -> None:
        """Keep ``error`` if it is the first."""
        if self.error is None:
            self.error = _copy(error)

    def check(self) -> None:
        """Raises: CommError: the first error, if there was one."""
        if self.error is not None:
            raise _copy(self.error)


def _copy(error: CommError) -> CommError:
    """The same error without its traceback, whose frames would keep tensors alive."""
    copied = error.__class__.__new__(error.__class__)
    copied.args = error.args
    copied.__dict__.update(error.__dict__)
    return copied


class FailureReports:
    """The one key of the store that holds the first failure of a world.

    Args:
        look_up_seconds: for which a report is awaited after a connection was closed.
        processes: where a rank that was killed is looked for; None: nowhere.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        look_up_seconds: float = LOOK_UP_SECONDS,
        processes: RankProcesses | None = None,
    ) -> None:
        self._store = store
        self._processes = processes
        self._has_lost_connection = False
        self._look_up_seconds = look_up_seconds
        self._rank = rank
        self._is_acknowledged = False
        self.is_store_ended = False  # as ``find`` saw it last

    def report(self, rank: int, text: str) -> None:
        """Write ``rank``'s traceback, unless another rank was first, or it is this rank, which has lost a connection to
        one that failed. Never raises.
        """
        if rank == self._rank and self._has_lost_connection:
            return
        value = json.dumps({"rank": rank, "traceback": clip(text)})
        try:
            self._store.compare_set(_KEY, "", value)
        except Exception:
            return  # the store's host may be the rank that died; the peers notice without it

    def find(self, seconds: float = 0.0) -> RankFailedError | None:
        """The first failure, looked for during ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                is_found = self._store.check([_KEY])
                self.is_store_ended = False
                if is_found:
                    report = json.loads(self._store.get(_KEY))
                    return RankFailedError(report["rank"], report["traceback"])
            except Exception:
                self.is_store_ended = True
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def acknowledge(self) -> int:
        """Record once that this rank knows of the failure. Returns: how many know."""
        seen = self._store.add(_SEEN, 0 if self._is_acknowledged else 1)
        self._is_acknowledged = True
        return int(seen)

    def linger(self, size: int) -> None:
        """Record that this rank knows; on rank 0, wait until all know. Never raises."""
        deadline = time.monotonic() + _LINGER_SECONDS
        try:
            while self.acknowledge() < size and self._rank == 0 and time.monotonic() < deadline:
                time.sleep(0.02)
        except Exception:
            return

    def explain(self, error: BaseException, what: str, peers: Sequence[int] = ()) -> CommError:
        """The error to raise when torch.distributed raised ``error`` in ``what``.

        Args:
            peers: the ranks that take part in it.
        """
        text = str(error).strip()
        if "timed out" in text.lower():
            return self.find() or CommError(
                f"{what} timed out: {text}",
                where=f"rank {self._rank}",
                do="see what the ranks that are behind were doing; if they were slow, give init_distributed more time.",
                code="comm-timeout",
            )
        return self._find_cause(what, peers) or CommError(
            f"{what} failed: {text}",
            where=f"rank {self._rank}",
            do="look at the other ranks' output: one of them was killed, lost its network, or hangs.",
            code="comm-connection",
        )

    def _find_cause(self, what: str, peers: Sequence[int]) -> RankFailedError | None:
        """The failure that has closed a connection of this rank."""
        processes = self._processes
        if processes is None:
            return self.find(self._look_up_seconds)
        text = f"Its process has ended without a report: killed, or out of memory. Rank {self._rank} saw it in {what}"
        began = time.monotonic()
        self._has_lost_connection = True
        with contextlib.suppress(RuntimeError):  # the store has ended
            self._store.set(f"{_LOST}/{self._rank}", "")
            processes.look_up(range(processes.size))
            while (waited := time.monotonic() - began) < self._look_up_seconds:
                have_ended = processes.have_ended()
                causes = self._without_note(rank for rank in have_ended if have_ended[rank])
                if not causes and waited > _SILENT_PEER_SECONDS:
                    silent = self._without_note(peers)
                    causes = silent if len(silent) == 1 and silent[0] not in have_ended else []
                # One that raised has reported before its process ended.
                if (failure := self.find()) is not None:
                    return failure
                if self.is_store_ended:
                    break
                if causes:
                    self.report(causes[0], text)
                time.sleep(0 if causes else 0.05)
            else:
                return None
        return RankFailedError(0, text) if processes.have_ended().get(0) else None

    def _without_note(self, ranks: Iterable[int]) -> list[int]:
        """Those that have not noted that they lost a connection."""
        return [rank for rank in ranks if not self._store.check([f"{_LOST}/{rank}"])]


class FailureWatch:
    """A thread that polls for the first failure of the world, and then calls ``on_failure`` once.

    For ranks that block where no exception reaches them, such as in ``.item()`` behind a collective on a GPU. It makes
    one request to the store in each interval.

    Args:
        next_rank: reported as failed where its process ends without a report; None: not watched. Closed with this.
    """

    def __init__(
        self,
        failures: FailureReports,
        on_failure: Callable[[RankFailedError], None],
        interval_seconds: float,
        next_rank: NextRank | None = None,
    ) -> None:
        self._failures = failures
        self._on_failure = on_failure
        self._next_rank = next_rank
        self._interval_seconds = interval_seconds
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-failure-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped.wait(self._interval_seconds):
            was_store_ended = self._failures.is_store_ended
            failure = self._failures.find()
            if failure is None and was_store_ended and self._failures.is_store_ended:
                failure = RankFailedError(
                    0, "The process that hosts the store (rank 0's, or the launcher's) has ended."
                )
            if failure is None and self._next_rank is not None and self._next_rank.has_ended():
                # One that raised has reported before its process ended.
                failure = self._failures.find() or RankFailedError(
                    self._next_rank.rank, "Its process has ended without a report: killed, or out of memory."
                )
                self._failures.report(failure.failed_rank, failure.remote_traceback)
            if failure is not None:
                self._on_failure(failure)
                with contextlib.suppress(Exception):  # the store has ended
                    self._failures.acknowledge()
                return

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._is_stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LINGER_SECONDS)
        if self._next_rank is not None:
            self._next_rank.close()


class ExceptHook:
    """Reports an uncaught exception, then calls the excepthook that was there.

    Python's own and torch's print an error of Shoal's with the frames of the script alone; SHOAL_TRACEBACK=1 shows all.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report
        self._previous = sys.excepthook
        self._pid = os.getpid()
        self._hook = self._on_exception  # one bound method object, so that `is` compares it
        sys.excepthook = self._hook

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if "refers to a single memory location" in str(error):  # torch's error for a write to an expanded tensor
            error.add_note(_SHARDED_WRITE)
        if self._pid == os.getpid():  # not in a forked child, whose parent handles its failure
            self._report(error)
        module = str(getattr(self._previous, "__module__", ""))
        prints_only = self._previous is sys.__excepthook__ or module.startswith("torch.")
        if isinstance(error, ShoalError) and prints_only and not wants_tracebacks() and not _is_from_script(error):
            trace = _frames_of_script(trace)
            error.with_traceback(trace)
            error.__cause__, error.__suppress_context__ = None, True  # its message is part of the error's
        self._previous(kind, error, trace)

    def remove(self) -> None:
        """Restore the old hook, unless another was installed since."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous
        self._report = lambda error: None


def _is_from_script(error: BaseException) -> bool:
    """True if another error caused it, in code that is neither this package's nor a library's."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None:
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(cause.__traceback__)]
    return not all(file.startswith((_PACKAGE, *_LIBRARIES, "<frozen")) for file in files) or _is_from_script(cause)


def _frames_of_script(trace: TracebackType | None) -> TracebackType | None:
    """The frames before the first one in this package."""
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return TracebackType(_frames_of_script(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 30
_GOODBYE = b"."


class NextRank:
    """A connection to the next rank's process, which the kernel closes when that process ends, however it ends.

        rank 0 ---> rank 1 ---> rank 2 ---> ... ---> rank 0

    Each rank watches the next one only: one connection a rank, no message, no request to the store after the start. A
    process that is killed needs not do anything, and one that is only slow (a long call that holds the GIL, swapping)
    keeps its connection, while a heartbeat would take it for dead. A machine that loses power or its network shows
    after ``_SILENT_SECONDS``, by TCP's keep-alive. ``close`` says goodbye, so that an orderly end is no failure.

    Args:
        store: common to all ranks, for the addresses.
    """

    _open: ClassVar[weakref.WeakSet[NextRank]] = weakref.WeakSet()

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = (rank + 1) % size
        self._store = store
        self._is_over = False
        self._next: socket.socket | None = None
        address = _own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The kernel completes connections before they are accepted.
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        store.set(f"next/{rank}", f"{address} {self._listener.getsockname()[1]}")
        self._open.add(self)

    def has_ended(self) -> bool:
        """True if the next rank's process ended without closing its connection. Blocks for a few seconds at most."""
        if self._is_over:
            return False
        try:
            if self._next is None and self._store.check([key := f"next/{self.rank}"]):
                address, port = self._store.get(key).decode().split()
                self._next = _connect(address, int(port))
        except (OSError, RuntimeError):
            self._is_over = True  # not reachable, or the store has ended: this rank watches no other
        if self._next is None:
            return False
        try:
            goodbye = self._next.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            goodbye = b""
        self._is_over = True
        return goodbye != _GOODBYE

    def close(self) -> None:
        """Say goodbye and close both connections. Idempotent."""
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as before:
                    before.send(_GOODBYE)
        self._forget()

    def _forget(self) -> None:
        self._is_over = True
        self._listener.close()
        if self._next is not None:
            self._next.close()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child, such as a data loader's worker: it would keep the connections open after its parent."""
        for each in list(cls._open):
            each._forget()


os.register_at_fork(after_in_child=NextRank.forget_all)


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return connection


def _own_address(store: Store) -> str:
    """This machine's address in the network of the store."""
    host, port = address_of(store)
    return own_address(host or "127.0.0.1", port or 1) or "127.0.0.1"
