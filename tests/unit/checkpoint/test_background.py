"""A thread that writes while training continues: its priority and its share of a core."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from shoal.checkpoint.save import Background


def on_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def work(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_the_thread_and_those_that_it_starts_have_a_lower_priority_and_training_keeps_its_own() -> None:
    background, before, found = Background(), priority(), []

    def write() -> None:
        background.enter()
        found.append(priority())
        on_thread(lambda: found.append(priority()))

    on_thread(write)
    background.enter()  # by the thread that trains: nothing
    assert found == [max(before, 10)] * 2
    assert priority() == before


def test_a_pause_keeps_the_thread_to_a_twentieth_of_a_core_until_somebody_waits_for_it() -> None:
    background, elapsed = Background(), []

    def write() -> None:
        begin = time.monotonic()
        work(0.02)  # before it enters, and part of its share
        background.enter()
        for _ in range(3):
            work(0.005)
            background.pause()
        elapsed.append(time.monotonic() - begin)
        background.hurry()
        background.pause()
        work(0.04)
        begin = time.monotonic()
        background.pause()
        elapsed.append(time.monotonic() - begin)

    on_thread(write)
    assert elapsed[0] >= 20 * 0.035
    assert elapsed[1] < 0.5  # its share would take 0.7 more
    begin = time.monotonic()
    background.pause()  # a synchronous save has not entered
    Background().pause()
    assert time.monotonic() - begin < 1.0  # 20 times this thread's time is more
