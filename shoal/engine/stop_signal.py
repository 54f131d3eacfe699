"""``checkpoint.save_on_signal``: a signal that asks the process to end is kept until the step is saved.

    SIGTERM or SIGUSR1 on some rank -> noted -> ranks agree in the step -> checkpoint -> the signal takes its course

A second signal takes its course at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_NUMBERS = [signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])


class StopSignal:
    """Notes signals from now on. In a thread other than the main one, where Python sees none, it notes nothing."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came; 0: none
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self.deliver(number)  # the second one: no step is coming
        self.number = number

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
