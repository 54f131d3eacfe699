"""Only one job at a time saves to a folder.

The lock is an owner file (``shoal.process``). Of a process on this machine the kernel says whether it lives. The
owner changes the file's time every few seconds, so that a job on another machine sees whether the owner still runs.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shoal.errors import CheckpointError
from shoal.process import FileOwner, open_owner, read_owner, sign, try_lock

T = TypeVar("T")

NAME = ".shoal-lock"
BEAT_SECONDS = 5.0
STILL_SECONDS = 20.0  # a lock of another host that is not touched for so long is stale
_ATTEMPTS = 100  # to take a lock that other jobs take and release at the same time
_BIRTH_SECONDS = 1.0  # between the making of a lock file and its first text


class FolderLock:
    """A lock on a local (or shared) folder.

    Args:
        still_seconds: how long another machine's lock is watched before it is taken for stale.
    """

    def __init__(self, folder: Path, *, still_seconds: float = STILL_SECONDS) -> None:
        self._path = folder / NAME
        self._still_seconds = still_seconds
        self._owner = FileOwner.this(secrets.token_hex(8), 0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Raises: CheckpointError: another job that lives is saving here. OSError: the folder cannot be written."""
        for _ in range(_ATTEMPTS):
            try:
                os.close(sign(self._owner, str(self._path), mode=0o644))
                break
            except FileExistsError:
                self._clear()
        else:
            raise self._locked(None)
        thread = threading.Thread(target=self._beat, name="shoal-lock", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: without a beat the lock would be taken for stale
            self._path.unlink(missing_ok=True)
            raise
        self._thread = thread

    def release(self) -> None:
        """Remove the lock, if it is still this job's. Idempotent."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        owner = self._read()
        if owner is not None and owner.job == self._owner.job:
            with suppress(OSError):
                self._path.unlink()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _clear(self) -> None:
        """Remove a stale lock. Raises: CheckpointError: its owner lives."""
        deadline = time.monotonic() + min(_BIRTH_SECONDS, self._still_seconds)
        while (owner := self._read()) is None and os.path.lexists(self._path) and time.monotonic() < deadline:
            time.sleep(0.02)
        if owner is not None and not (owner.is_gone() if owner.is_here else self._is_still()):
            raise self._locked(owner)
        self._break(owner)

    def _read(self) -> FileOwner | None:
        """The process that holds the lock; None: the lock is gone, or names none."""
        return self._ask(read_owner)

    def _is_still(self) -> bool:
        """Watch the lock of a process that this kernel does not know. True: nothing touches it, or it is gone."""
        before = self._changed()
        deadline = time.monotonic() + self._still_seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.2, self._still_seconds))
            if self._changed() != before:
                return self._read() is None
        return True

    def _changed(self) -> int | None:
        return self._ask(lambda fd: os.fstat(fd).st_mtime_ns)

    def _ask(self, read: Callable[[int], T]) -> T | None:
        """What the open lock file says; None: it cannot be opened.

        A network file system asks its server when a file is opened, not when it is named.
        """
        try:
            fd = open_owner(str(self._path))
        except OSError:
            return None
        try:
            return read(fd)
        finally:
            os.close(fd)

    def _break(self, owner: FileOwner | None) -> None:
        """Remove a stale lock, and never one that another job has taken meanwhile.

        The job that breaks a lock holds the kernel's lock on that very file, so of several only one finds it in place.
        """
        try:
            fd = open_owner(str(self._path), os.O_RDWR)  # NFS locks what is open for writing
        except FileNotFoundError:
            return
        except OSError:  # a folder, a link: no job of ours has put it there
            stale = self._path.with_name(f"{NAME}.stale-{self._owner.job}")
            with suppress(FileNotFoundError):
                os.rename(self._path, stale)
                stale.unlink(missing_ok=True)
            return
        try:
            try_lock(fd, fcntl.LOCK_EX)  # some network file systems have no locks
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(self._path)) and self._read() == owner:
                    self._path.unlink()
        finally:
            os.close(fd)

    def _locked(self, owner: FileOwner | None) -> CheckpointError:
        who = f"process {owner.pid} on {owner.host}" if owner is not None else "its process is not known"
        return CheckpointError(
            f"another job is saving to this folder: {who}.",
            where=str(self._path.parent),
            do=f"give each job a folder of its own; if that job is gone, delete {self._path}.",
            code="checkpoint-locked",
        )

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)
