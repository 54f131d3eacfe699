"""Who made a folder, and whether that process still lives: the kernel is asked, never a clock.

A living owner holds a lock on its owner file (flock), which the kernel lets go when the process ends, however it ends,
and which other containers of the machine see too. Where a file system does not tell other machines of locks, host,
machine and process must say the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shoal.process import boot, has_process
from shoal.process import started as _started

_MAX_BYTES = 4096


@dataclass(frozen=True)
class Owner:
    """A process, and what tells it from every other that had or will have its number."""

    host: str
    machine: str  # of one installation of a system
    boot: str  # of one start of one kernel, and one namespace of processes
    pid: int
    started: int | None  # ticks since boot
    job: str
    rank: int

    @staticmethod
    def this(job: str, rank: int) -> Owner:
        return Owner(socket.gethostname(), _machine(), boot(), os.getpid(), _started(os.getpid()), job, rank)

    def is_gone(self, *, is_lock_free: bool) -> bool:
        """Has it certainly ended?

        Args:
            is_lock_free: it held a lock, and nobody holds that now.
        """
        if self.host != socket.gethostname() or self.machine != _machine():
            return False
        if self.boot != boot():  # an earlier start of this machine, or another container on it
            return is_lock_free
        if self.started is None:
            return not has_process(self.pid)
        return _started(self.pid) != self.started


def sign(owner: Owner, folder_fd: int, name: str) -> int:
    """Make the owner file, lock it and then fill it: a file with text in it has been locked if it ever will be.

    Returns: its descriptor; the lock is held until that is closed.
    Raises: OSError.
    """
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        is_locked = _try_lock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps({**asdict(owner), "is_locked": is_locked}).encode())
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_if_gone(folder_fd: int, name: str) -> tuple[Owner, int] | None:
    """The owner, if it has certainly ended, and a descriptor that keeps others from clearing up at the same time."""
    fd = -1
    try:
        # Not blocking: a pipe in its place must not hold us up.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder_fd)
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        has_lock = is_file and _try_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = json.loads(os.read(fd, _MAX_BYTES)) if is_file else {}
        owner = Owner(**{field.name: found[field.name] for field in fields(Owner)})
        if type(owner.pid) is not int or not isinstance(owner.started, int | None):
            raise TypeError("no process")
        if owner.is_gone(is_lock_free=has_lock and found["is_locked"] is True):
            return owner, fd
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        pass  # somebody lives in it, or nobody can say who does
    if fd >= 0:
        os.close(fd)
    return None


def _try_lock(fd: int, how: int) -> bool:
    """False: the file system has no locks. Raises: BlockingIOError: another holds it."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _machine() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with suppress(OSError):
            return Path(path).read_text().strip()
    return ""
