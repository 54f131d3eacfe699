"""A process sleeps on a word of shared memory until another one wakes it."""

from __future__ import annotations

import mmap
import os
import threading
import time

import pytest

from shoal.comm.shm import WakeWord, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="ranks of this machine do not read each other's memory")


def wake_word(memory: mmap.mmap) -> WakeWord:
    return WakeWord(memoryview(memory).cast("q"), 3)


def test_a_sleep_ends_after_its_time() -> None:
    word = wake_word(mmap.mmap(-1, 4096))
    word.prepare()
    begin = time.monotonic()
    word.sleep(0.02)
    assert 0.015 < time.monotonic() - begin < 0.9


def test_a_wake_up_after_prepare_prevents_the_sleep() -> None:
    memory = mmap.mmap(-1, 4096)
    word = wake_word(memory)
    word.prepare()
    wake_word(memory).wake()
    begin = time.monotonic()
    for _ in range(100):
        word.sleep(0.9)
    assert time.monotonic() - begin < 0.9


def test_another_process_wakes_one_that_sleeps() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    word, other = wake_word(mmap.mmap(fd, 4096)), wake_word(mmap.mmap(fd, 4096))
    timer = threading.Timer(0.05, other.wake)
    word.prepare()
    begin = time.monotonic()
    timer.start()
    word.sleep(0.9)
    timer.join()
    os.close(fd)
    assert 0.04 < time.monotonic() - begin < 0.85
