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

from shoal.checkpoint import tree
from shoal.engine.log import say_on_rank_0
from shoal.engine.parts.part import Part

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


class SaveOnSignal(Part):
    """Saves the step in which a signal came on some rank, to the folder of the last save or load.

    Attributes:
        agreed: the number of a signal that came on some rank, as the step's exchange of status has found; 0: none.
    """

    def __init__(self) -> None:
        self._signal = StopSignal()
        self.agreed = 0
        self._has_stepped = False
        self._engine: Any = None

    @property
    def number(self) -> int:
        """Of the signal that came on this rank; 0: none."""
        return self._signal.number

    def prepare(self, engine: Any) -> None:
        self._engine = engine

    def at_step(self, was_applied: bool) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            if (client_state := self._engine.client_state_on_signal) is not None:
                tree.encode(client_state(), {}, "client_state")  # or raises now, and not at the signal

    def after_step(self) -> None:
        """Save, then let the signal take its course."""
        if not self.agreed:
            return
        engine, number = self._engine, self.agreed
        self.agreed = 0
        name, folder = signal.Signals(number).name, engine.checkpointing.folder
        if folder is None:
            text = f"{name}: nothing is saved: no folder is known before a save_checkpoint() or load_checkpoint()."
        else:
            state = engine.client_state_on_signal() if engine.client_state_on_signal is not None else None
            engine.save_checkpoint(folder, client_state=state)
            engine.checkpointing.finish()
            text = f"{name}: step {engine.global_steps} is saved in {os.fspath(folder)}."
        say_on_rank_0(engine.global_rank, text)
        self._signal.deliver(number)

    def before_destroy(self) -> None:
        self._signal.restore()
