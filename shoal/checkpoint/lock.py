"""One job at a time saves to a folder.

The lock is a file that names host and process. It beats: a job on another host that sees it still for a while knows
that its owner is gone. Of a process on this host, the kernel says whether it lives.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError

NAME = ".shoal-lock"
BEAT_SECONDS = 5.0
STILL_SECONDS = 20.0  # a lock of another host that does not beat for so long is stale


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
        while True:
            try:
                self._write(os.O_EXCL)
                break
            except FileExistsError:
                self._judge()
        self._thread = threading.Thread(target=self._beat, name="shoal-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give it back, if it is still this one's. Idempotent."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        owner = self._read()
        if owner is not None and owner.get("token") == self._token:
            with suppress(OSError):
                self._path.unlink()

    def _write(self, flags: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o644)
        with os.fdopen(fd, "w") as file:
            json.dump(
                {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid()), "token": self._token}, file
            )

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path.read_text()[:4096])
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _judge(self) -> None:
        """Return once the lock that is there is gone. Raises: CheckpointError: its owner lives."""
        owner = self._read()
        if owner is None:
            return
        pid = owner.get("pid")
        if owner.get("host") == _host() and isinstance(pid, int):
            if _started(pid) == owner.get("started") and _started(pid) is not None:
                raise self._held(owner)
        elif self._beats(owner):
            raise self._held(owner)
        self._break(owner)

    def _beats(self, owner: dict[str, Any]) -> bool:
        """Watch a lock whose owner cannot be asked."""
        before = self._changed()
        deadline = time.monotonic() + self._still_seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.2, self._still_seconds))
            if self._changed() != before:
                return self._read() is not None
        return False

    def _changed(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None

    def _break(self, owner: dict[str, Any]) -> None:
        """Take a stale lock away; where another job was faster, leave that one's alone."""
        aside = self._path.with_name(f"{NAME}.stale-{self._token}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        try:
            taken = json.loads(aside.read_text())
        except (OSError, ValueError):
            taken = {}
        if taken != owner:
            with suppress(OSError):
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)

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


def _host() -> str:
    return socket.gethostname()


def _started(pid: int) -> int | None:
    """When the process started, in ticks since boot; None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
