"""How a thread writes a checkpoint while training continues: at low priority, and on a small share of one core.

Where training fills the cores, each second of the thread is taken from it; the share spreads these seconds over many
steps. It also limits the memory bandwidth and the disk's that the thread takes. The priority lets it run where a core
would be idle.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

_NICE = 10
_SHARE = 0.05  # of one core's time


class Background:
    """Made by the thread that trains, for one thread that writes."""

    def __init__(self) -> None:
        self._trains = threading.get_ident()
        self._is_awaited = threading.Event()
        self._began: float | None = None  # when the thread did, if all its time was CPU time
        self._thread = self._nice = 0

    def enter(self) -> None:
        """Called by the thread that writes. Threads that it starts have its priority.

        What the thread did before is part of its share: after a copy at the priority of training it pauses.
        """
        if threading.get_ident() == self._trains:
            return
        if sys.platform == "linux":  # elsewhere a process has one priority
            self._nice = os.getpriority(os.PRIO_PROCESS, 0)
            self._thread = threading.get_native_id()
            if not self._is_awaited.is_set():
                self._set_priority(max(self._nice, _NICE))
        self._began = time.monotonic() - time.thread_time()

    def pause(self) -> None:
        """Called between two blocks. Order: blocks a thread that entered until its time is within the share."""
        if self._began is not None:
            self._is_awaited.wait(max(0.0, time.thread_time() / _SHARE - (time.monotonic() - self._began)))

    def hurry(self) -> None:
        """Training waits for the thread from now on: no pauses, and the first priority where the system allows it."""
        self._is_awaited.set()
        if self._thread:
            self._set_priority(self._nice)

    def _set_priority(self, nice: int) -> None:
        with suppress(OSError):  # not allowed, or the thread has ended
            os.setpriority(os.PRIO_PROCESS, self._thread, nice)
