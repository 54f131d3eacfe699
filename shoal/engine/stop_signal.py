"""``checkpoint.save_on_signal``: a signal that asks the process to end is kept until the step is saved.

    SIGTERM or SIGUSR1 on some rank -> noted -> ranks agree in the step -> checkpoint -> the signal takes its course

A second signal takes its course at once, unless it comes within a second: a launcher passes on the signal that the
terminal sends to its ranks too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

_NUMBERS = [signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])
_SAME_SECONDS = 1.0


class StopSignal:
    """Notes signals from now on. In a thread other than the main one, where Python sees none, it notes nothing."""

    def __init__(self, numbers: Sequence[int] = _NUMBERS) -> None:
        self.number = 0  # of the signal that came; 0: none
        self._noted_at = 0.0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in numbers}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at > _SAME_SECONDS:
            self.deliver(number)  # no step is coming

    def restore(self) -> None:
        """Signals do again what they did before. Idempotent."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def deliver(self, number: int) -> None:
        """Send this process a signal that some rank has got. It ends the process, unless the script handles it."""
        self.restore()
        self.number = 0
        os.kill(os.getpid(), number)
