"""Which process owns a file, and whether it has ended, as the kernel says: no clock decides.

A process number is used again; a number together with the time of its start is not. The owner file of a folder or lock
names host, machine, boot, process number and start time. Its writer holds the kernel's lock (flock) on it while it is
written, and as long as the descriptor stays open; other containers of the machine see that lock too.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

_MAX_BYTES = 4096


def started(pid: int) -> int | None:
    """When the process started, in ticks since boot; None: it has ended (a zombie has), or the system does not say."""
    values = _stat(pid)
    return None if not values or values[0] in "ZX" else int(values[19])


def is_stopped(pid: int) -> bool:
    """True if a signal or a debugger has stopped the process."""
    return _stat(pid)[:1] in (["T"], ["t"])


def has_pending(pid: int, number: int) -> bool:
    """True if the signal was sent to the process, which has not got it yet. Raises: OSError: there is none."""
    masks = re.findall(r"^(?:Shd|Sig)Pnd:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; empty: there is no such process, or no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def boot() -> str:
    """One start of one kernel and one namespace of processes: hosts may share a name, and a pid is one only here."""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{start}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def node() -> str:
    """This host, equal for processes that may share memory."""
    return f"{socket.gethostname()}/{boot()}"


def has_process(pid: int) -> bool:
    """True if a process may have this number now. A process that cannot be asked counts as there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


@dataclass(frozen=True)
class FileOwner:
    """The process that wrote an owner file."""

    host: str
    machine: str  # of one installation of a system
    boot: str  # of one start of one kernel, and one namespace of processes
    pid: int
    started: int | None  # ticks since boot
    job: str
    rank: int
    is_locked: bool = False  # its file system has locks

    @staticmethod
    def this(job: str, rank: int) -> FileOwner:
        return FileOwner(socket.gethostname(), _machine(), boot(), os.getpid(), started(os.getpid()), job, rank)

    @property
    def is_here(self) -> bool:
        """True if this kernel can say whether the process has ended."""
        return (self.host, self.machine, self.boot) == (socket.gethostname(), _machine(), boot())

    def is_gone(self, *, is_lock_free: bool = False) -> bool:
        """True if the process has certainly ended.

        Args:
            is_lock_free: no process holds the lock on the owner file.
        """
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return False
        if self.boot != boot():  # an earlier start of this machine, or another container on it
            return is_lock_free and self.is_locked
        if self.started is None:
            return not has_process(self.pid)
        return started(self.pid) != self.started


def sign(owner: FileOwner, path: str, *, folder_fd: int | None = None, mode: int = 0o600) -> int:
    """Make an owner file, lock it and then fill it: a file with text in it has been locked if it ever will be.

    Returns: its descriptor; it has the lock until it is closed.
    Raises: FileExistsError. OSError: nothing is left of the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder_fd)
    try:
        is_locked = try_lock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps(asdict(replace(owner, is_locked=is_locked))).encode())
    except BaseException:  # a full disk: a file that names no process would keep others waiting
        os.close(fd)
        os.unlink(path, dir_fd=folder_fd)
        raise
    return fd


def open_owner(path: str, how: int = os.O_RDONLY, *, folder_fd: int | None = None) -> int:
    """An owner file's descriptor. Does not block: a pipe in its place must not stop this process. Raises: OSError."""
    return os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder_fd)


def read_owner(fd: int) -> FileOwner | None:
    """The process that an owner file names; None: the file names none."""
    try:
        values = json.loads(os.read(fd, _MAX_BYTES)) if stat.S_ISREG(os.fstat(fd).st_mode) else {}
        owner = FileOwner(**{field.name: values[field.name] for field in fields(FileOwner)})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_process = type(owner.pid) is int and isinstance(owner.started, int | None)
    return replace(owner, is_locked=owner.is_locked is True) if is_process else None


def lock_if_gone(path: str, folder_fd: int) -> tuple[FileOwner, int] | None:
    """The owner, if it has certainly ended, and a descriptor whose lock keeps other processes from removing the files
    at the same time. None: it lives, or the file does not name its owner.
    """
    with suppress(OSError):
        fd = open_owner(path, folder_fd=folder_fd)
        with suppress(OSError, OverflowError):
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            is_lock_free = is_file and try_lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = read_owner(fd)
            if owner is not None and owner.is_gone(is_lock_free=is_lock_free):
                return owner, fd
        os.close(fd)
    return None


def try_lock(fd: int, how: int) -> bool:
    """False: the file system has no locks. Raises: BlockingIOError: another process holds it."""
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
