"""A setting of the whole process that holds while any of its threads is in a block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack


class SharedBlock(AbstractContextManager[None]):
    """A context manager that several threads, and blocks inside of each other, may be in at the same time.

    Args:
        make: makes what the first thread enters, and the last one to leave exits.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_inside = 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._entered.enter_context(self._make())
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._entered.close()
