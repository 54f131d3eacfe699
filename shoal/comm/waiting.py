"""What a rank waits for, logged once it has taken 30 seconds, 60, 120, ...: a hang is seen long before the time-out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

SILENT_SECONDS = 30.0

logger = logging.getLogger("shoal")


class LongWait:
    """One wait, from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._silent_seconds = SILENT_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def report(self, what: Callable[[str], str]) -> None:
        """Log ``what("waits for 30 s")`` if it is time to."""
        if (seconds := self.seconds) >= self._silent_seconds:
            self._silent_seconds = max(2 * self._silent_seconds, seconds)
            logger.warning("%s", what(f"has been waiting for {seconds:.0f} s"))


class WaitWatch:
    """A thread that reports a wait inside a call that blocks. Setting ``current`` is all that a wait costs.

    Attributes:
        current: describes the wait that this rank is in, as ``LongWait.report`` takes it; None: it is in none.
    """

    def __init__(self) -> None:
        self.current: Callable[[str], str] | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-wait-watch", daemon=True)

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        seen = None
        while not self._is_stopped.wait(SILENT_SECONDS / 10):
            current = self.current
            if current is not seen:
                seen, wait = current, LongWait()
            elif current is not None:
                wait.report(current)

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()
