"""One rank's failure, told to all: the first traceback goes to the store, where every rank that stumbles finds it.

1  failing rank    its exception reaches ``World.report_failure`` (the engine, or the excepthook below)
2  failing rank    puts rank and traceback into the store (the first one stays) and on the board in shared memory,
                   and closes its Gloo connections
3  other ranks     that wait on a board see the flag within a millisecond; over Gloo they get a closed connection
4  other ranks     look the traceback up, raise RankFailedError with it, and pass it on
5  rank 0          whose process holds the store, stays until all have looked, or for two seconds
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from torch._C._distributed_c10d import Store

from shoal.errors import CommError, RankFailedError

LOOK_UP_SECONDS = 5.0  # what a failing rank gets to report after its connections broke
MAX_TRACEBACK_CHARACTERS = 16_000

_LINGER_SECONDS = 2.0
_KEY = "failure"
_SEEN = "seen"


class FailureReports:
    """The store's one place for the first failure of a world."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def report(self, rank: int, text: str) -> None:
        """Put ``rank``'s traceback there, unless another rank was first. Never raises."""
        value = json.dumps({"rank": rank, "traceback": clip(text)})
        try:
            self._store.compare_set(_KEY, "", value)
        except Exception:
            return  # the store's host may be the rank that died; the peers find out by themselves

    def find(self, seconds: float = 0.0) -> RankFailedError | None:
        """The first failure, looked for during ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self._store.check([_KEY]):
                    found = json.loads(self._store.get(_KEY))
                    return RankFailedError(found["rank"], found["traceback"])
            except Exception:
                return None  # no store any more
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def linger(self, size: int) -> None:
        """Say that this rank knows; on rank 0, wait for the others to know. Never raises."""
        deadline = time.monotonic() + _LINGER_SECONDS
        try:
            seen = self._store.add(_SEEN, 1)
            while self._rank == 0 and seen < size and time.monotonic() < deadline:
                time.sleep(0.02)
                seen = self._store.add(_SEEN, 0)
        except Exception:
            return

    def explain(self, error: BaseException, what: str) -> CommError:
        """What to raise when torch.distributed raised ``error`` in ``what``."""
        return self.find(LOOK_UP_SECONDS) or CommError(
            f"{what} failed: {str(error).strip()}",
            where=f"rank {self._rank}",
            do="look at the other ranks' output: one of them was killed, lost its network, or is stuck.",
            code="comm-connection",
        )


def clip(text: str) -> str:
    """The end of a long traceback, which says most."""
    if len(text) <= MAX_TRACEBACK_CHARACTERS:
        return text
    return "... (cut)\n" + text[-MAX_TRACEBACK_CHARACTERS:]


class ExceptHook:
    """Reports what a process dies of, before the hook that was there prints it."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report
        self._previous = sys.excepthook
        self._pid = os.getpid()
        self._hook = self._on_exception  # one bound method, to be told apart from others
        sys.excepthook = self._hook

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._pid == os.getpid():  # not in a fork, whose failure is its parent's to judge
            self._report(error)
        self._previous(kind, error, trace)

    def remove(self) -> None:
        """Give the old hook back, unless someone has put another on top since."""
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous
        self._report = _report_nothing


def _report_nothing(error: BaseException) -> None:
    return None
