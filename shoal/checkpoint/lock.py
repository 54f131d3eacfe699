"""One job at a time saves to a folder.

The lock is a file that names machine and process. It beats: a job on another machine that sees it still for a while
knows that its owner is gone. Of a process on this machine, the kernel says whether it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError
from shoal.process import boot, has_process, started

NAME = ".shoal-lock"
BEAT_SECONDS = 5.0
STILL_SECONDS = 20.0  # a lock of another host that does not beat for so long is stale
_MAX_BYTES = 4096
_ATTEMPTS = 100  # to take a lock that others take and give back at the same time
_BIRTH_SECONDS = 1.0  # what its owner gets between making the file and writing its name into it


class FolderLock:
    """A lock on a local (or shared) folder.

    Args:
        still_seconds: how long a foreign lock is watched before it is taken for stale.
    """

    def __init__(self, folder: Path, *, still_seconds: float = STILL_SECONDS) -> None:
        self._path = folder / NAME
        self._still_seconds = still_seconds
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Raises: CheckpointError: another job that lives is saving here. OSError: the folder cannot be written."""
        for _ in range(_ATTEMPTS):
            try:
                self._write()
                break
            except FileExistsError:
                self._judge()
        else:
            raise self._held({})
        thread = threading.Thread(target=self._beat, name="shoal-lock", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: without a beat it would be taken for stale
            self._path.unlink(missing_ok=True)
            raise
        self._thread = thread

    def release(self) -> None:
        """Give it back, if it is still this one's. Idempotent."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        owner = _read(self._path)
        if owner is not None and owner.get("token") == self._token:
            with suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o644)
        try:
            with os.fdopen(fd, "w") as file:
                json.dump({**_self(), "token": self._token}, file)
        except BaseException:  # a full disk: a lock that names nobody would hold up the next save
            self._path.unlink(missing_ok=True)
            raise

    def _judge(self) -> None:
        """Return once the lock that is there is gone. Raises: CheckpointError: its owner lives."""
        owner = _read(self._path)
        deadline = time.monotonic() + min(_BIRTH_SECONDS, self._still_seconds)
        while owner == {} and time.monotonic() < deadline:
            time.sleep(0.02)
            owner = _read(self._path)
        if owner is None:
            return
        here, pid = _self(), owner.get("pid")
        if owner.get("host") == here["host"] and owner.get("machine") == here["machine"] and isinstance(pid, int):
            if _lives(pid, owner.get("started")):
                raise self._held(owner)
        elif self._beats():
            raise self._held(owner)
        self._break(owner)

    def _beats(self) -> bool:
        """Watch a lock whose owner cannot be asked."""
        before = self._changed()
        deadline = time.monotonic() + self._still_seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.2, self._still_seconds))
            if self._changed() != before:
                return _read(self._path) is not None
        return False

    def _changed(self) -> int | None:
        try:
            fd = _open(self._path)  # a network file system asks its server when a file is opened, not when it is named
        except OSError:
            return None
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

    def _break(self, owner: dict[str, Any]) -> None:
        """Take a stale lock away, and never one that another job has taken meanwhile.

        Who breaks a lock holds the kernel's lock on that very file, so of several only one finds it still in its place.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError:  # a folder, a link: no job of ours has put it there
            aside = self._path.with_name(f"{NAME}.stale-{self._token}")
            with suppress(FileNotFoundError):
                os.rename(self._path, aside)
                aside.unlink(missing_ok=True)
            return
        try:
            with suppress(OSError):  # some network file systems have no such locks, and must do without
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.lstat(self._path)) and _read(self._path) == owner:
                self._path.unlink()
        except FileNotFoundError:
            return
        finally:
            os.close(fd)

    def _held(self, owner: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"another job is saving to this folder: process {owner.get('pid')} on {owner.get('host')}.",
            where=str(self._path.parent),
            do=f"give each job a folder of its own; if that job is gone, delete {self._path}.",
            code="checkpoint-locked",
        )

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)


def _self() -> dict[str, Any]:
    """This process, and the machine whose kernel knows it."""
    return {"host": socket.gethostname(), "machine": boot(), "pid": os.getpid(), "started": started(os.getpid())}


def _lives(pid: int, ticks: Any) -> bool:
    if ticks is not None:
        return bool(started(pid) == ticks)
    return pid > 0 and has_process(pid)


def _open(path: Path) -> int:
    # Not blocking: a pipe in the place of the lock must not hold the job up.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; nobody by name if it cannot be read; None: it is gone."""
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    except OSError:
        return {}
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        found = json.loads(os.read(fd, _MAX_BYTES)) if is_file else None
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return found if isinstance(found, dict) else {}
