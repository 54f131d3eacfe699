"""One job saves to a folder: a second one gets an error that names it; only a lock of a dead process is broken."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import lock
from shoal.checkpoint.lock import FolderLock
from shoal.errors import CheckpointError
from shoal.process import FileOwner
from tests.helpers.checkpoint_maker import local, make

SHORT_SECONDS = 0.2  # a lock of another process is watched for so long in these tests
LONG_SECONDS = 10.0  # longer than any of these tests may wait
QUICK_SECONDS = 5.0  # asking the kernel takes less, on the slowest machine

HOLDER = """
import sys, time
from pathlib import Path
from shoal.checkpoint.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def other_job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def held(folder: Path, still_seconds: float = SHORT_SECONDS) -> Iterator[float]:
    """Take the lock and give it back. Gives: how long the taking took."""
    mine = FolderLock(folder, still_seconds=still_seconds)
    began = time.monotonic()
    mine.acquire()
    try:
        yield time.monotonic() - began
    finally:
        mine.release()


def owner_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / lock.NAME).read_text())
    return found


def write_owner(folder: Path, **changes: Any) -> None:
    """A lock as this process would write it, but for the changes."""
    (folder / lock.NAME).write_text(json.dumps({**asdict(FileOwner.this("0" * 16, 0)), **changes}))


def test_a_second_job_gets_host_and_process_of_the_first_and_proceeds_once_it_is_dead(tmp_path: Path) -> None:
    with other_job(tmp_path) as process:
        with pytest.raises(CheckpointError) as caught:
            make(local(tmp_path), 1)
        assert caught.value.code == "checkpoint-locked"
        assert f"process {process.pid} on {socket.gethostname()}" in str(caught.value)
        assert os.listdir(tmp_path) == [lock.NAME]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert owner_of(tmp_path)["pid"] == process.pid
        began = time.monotonic()
        make(local(tmp_path), 1)
        assert time.monotonic() - began < QUICK_SECONDS
    assert sorted(os.listdir(tmp_path)) == ["latest", "step1"]


def test_a_job_that_is_stopped_but_not_dead_keeps_its_lock(tmp_path: Path) -> None:
    with other_job(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=f"process {process.pid}"), held(tmp_path):
            pass


def test_the_lock_of_a_process_whose_number_was_given_to_another_is_broken(tmp_path: Path) -> None:
    write_owner(tmp_path, started=1)  # this process lives, and was started later
    with held(tmp_path, LONG_SECONDS) as seconds:
        assert seconds < QUICK_SECONDS
        assert owner_of(tmp_path)["job"] != "0" * 16


def test_the_lock_of_this_very_process_is_not_broken(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()} on"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


@pytest.mark.parametrize("foreign", [{"host": "elsewhere"}, {"boot": "another boot/1"}], ids=["host", "boot"])
def test_a_lock_of_another_machine_is_broken_only_when_it_no_longer_beats(
    tmp_path: Path, foreign: dict[str, Any]
) -> None:
    write_owner(tmp_path, **foreign)
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(SHORT_SECONDS / 4):
            os.utime(tmp_path / lock.NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError) as caught, held(tmp_path):
            pass
        assert caught.value.code == "checkpoint-locked"
    finally:
        is_over.set()
        thread.join()
    with held(tmp_path) as seconds:
        assert seconds >= SHORT_SECONDS


def test_an_active_lock_has_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    with held(tmp_path):
        first = (tmp_path / lock.NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 5
        while (tmp_path / lock.NAME).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.01)


def test_a_lock_that_is_given_back_while_it_is_watched_is_taken(tmp_path: Path) -> None:
    write_owner(tmp_path, host="elsewhere")
    timer = threading.Timer(0.1, (tmp_path / lock.NAME).unlink)
    timer.start()
    with held(tmp_path, still_seconds=LONG_SECONDS) as seconds:
        assert seconds < QUICK_SECONDS
    timer.join()


def as_text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "litter",
    [
        pytest.param(as_text(""), id="empty"),
        pytest.param(as_text("[]"), id="no object"),
        pytest.param(as_text("[" * 4000), id="deep"),
        pytest.param(as_text('{"pid": -1, "host": 3}'), id="nonsense"),
        pytest.param(lambda path: path.write_bytes(os.urandom(1 << 20)), id="noise"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(lambda path: path.symlink_to("/nowhere"), id="dangling link"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), id="endless link"),
    ],
)
def test_what_nobody_can_have_written_there_as_a_lock_does_not_hold_a_save_up(
    tmp_path: Path, litter: Callable[[Path], object]
) -> None:
    litter(tmp_path / lock.NAME)
    with held(tmp_path) as seconds:
        assert seconds < QUICK_SECONDS
        assert owner_of(tmp_path)["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_is_just_being_written_is_not_taken_for_litter(tmp_path: Path) -> None:
    (tmp_path / lock.NAME).touch()
    timer = threading.Timer(0.1, lambda: write_owner(tmp_path))
    timer.start()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"), held(tmp_path):
        pass
    timer.join()


def test_a_disk_that_is_full_when_the_lock_is_written_leaves_no_lock_without_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), held(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_system_without_threads_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"), held(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_of_many_that_break_a_stale_lock_at_once_one_holds_it(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []
    refused: list[str] = []
    start = threading.Barrier(8)

    def job(number: int) -> None:
        start.wait()
        try:
            with held(tmp_path):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.02)
                inside.remove(number)
        except CheckpointError as error:
            refused.append(error.code)

    for _ in range(10):
        write_owner(tmp_path, started=1)
        threads = [threading.Thread(target=job, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(most) == 1
    assert set(refused) == {"checkpoint-locked"}
    assert len(most) + len(refused) == 80
    assert os.listdir(tmp_path) == []


def test_giving_back_leaves_a_lock_alone_that_is_another_jobs_by_now(tmp_path: Path) -> None:
    mine = FolderLock(tmp_path)
    mine.acquire()
    write_owner(tmp_path, pid=1)
    mine.release()
    assert owner_of(tmp_path)["pid"] == 1
