"""A word of shared memory on which one process sleeps until another wakes it: Linux's futex(2).

    sleeper   prepare()    sets the word, then looks once more for what it waits for, then sleep()
    waker     wake()       after it has written what the sleeper waits for; a system call only where the word is set

A processor may delay a store past a later load, so a wake-up can be lost in theory: every sleep has an end.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_FUTEX = 202  # the number of the system call on x86-64, the only machine where ranks read each other's memory
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class WakeWord:
    """One such word.

    Args:
        words: shared memory, of 64-bit words.
        index: of the word.
    """

    def __init__(self, words: memoryview, index: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(words, 8 * index)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    def prepare(self) -> None:
        """From now on ``wake`` ends, or prevents, the next ``sleep``."""
        self._word.value = 1

    def sleep(self, seconds: float) -> None:
        """Block until ``wake``, a signal, or for less than a second. Other threads of the process run."""
        limit = _Timespec(0, int(seconds * 1e9))
        _syscall()(_FUTEX, self._address, _WAIT, 1, ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        if self._word.value:
            self._word.value = 0
            _syscall()(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)


@cache
def _syscall() -> Any:
    return ctypes.CDLL(None).syscall
