"""A folder of one process's own below a folder that many may use; what dead processes left there is cleared away.

    <folder>/shoal-offload-<job, 32 hexadecimal digits>-rank<r>/     mode 0700
        owner.json                                                   who made it; locked while that process lives
        extent-0000.bin ...                                          mode 0600

Nothing is removed but folders of this form, of this user, whose owner has certainly ended, and in them nothing but
files of the names above.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from shoal.errors import TierError, UsageError
from shoal.process import FileOwner, lock_if_gone, sign

logger = logging.getLogger("shoal")

_FOLDER = re.compile(r"shoal-offload-([0-9a-f]{32})-rank([0-9]{1,9})", re.ASCII)
_FILE = re.compile(r"extent-[0-9]{4,}\.bin|probe|owner\.json", re.ASCII)
_OWNER = "owner.json"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """Made at construction, after what dead processes left was cleared away; removed by ``remove()``.

    Args:
        parent: must exist and be writable.
        job: 32 hexadecimal digits that the ranks of a job share; None: new ones.

    Raises: TierError: the parent is not there, no folder, or not writable. UsageError: ``job`` is of another form.
    """

    def __init__(self, parent: Path, *, rank: int, job: str | None = None) -> None:
        job = uuid.uuid4().hex if job is None else job
        name = f"shoal-offload-{job}-rank{rank}"
        if not _FOLDER.fullmatch(name):
            raise UsageError(f"a job is named by 32 hexadecimal digits and a rank, not {job!r} and {rank}.")
        self.parent = parent.absolute()
        self.path = self.parent / name
        self.swept = sweep(self.parent)
        self._pid = os.getpid()
        self._owner_fd = -1
        self.fd = -1
        try:
            os.mkdir(self.path, 0o700)
            self.fd = os.open(self.path, _OPEN_FOLDER)
            self._owner_fd = sign(FileOwner.this(job, rank), _OWNER, folder_fd=self.fd)
        except OSError as error:
            if self.fd >= 0:
                self.remove()
            raise _unusable(self.parent, error) from error

    def make(self, name: str, flags: int = 0) -> int:
        """A new file: its descriptor, open for reading and writing. Raises: OSError: also where the name is taken."""
        if not _FILE.fullmatch(name):
            raise UsageError(f"{name!r} is not a name that this folder clears away.")
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE | flags, 0o600, dir_fd=self.fd)

    def open(self, name: str, flags: int) -> int:
        """A file of this folder, followed through no link. Raises: OSError."""
        return os.open(name, _SAFE | flags, dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def remove(self) -> None:
        """Remove the folder with its files. Idempotent; in a process forked from the owner it does nothing."""
        if self.fd < 0 or os.getpid() != self._pid:
            return
        _empty(self.path, self.fd)
        os.close(self.fd)
        if self._owner_fd >= 0:
            os.close(self._owner_fd)
        self.fd = self._owner_fd = -1


_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


def sweep(parent: Path) -> list[str]:
    """Remove the folders in ``parent`` whose owners have ended. Returns their names.

    Raises: TierError: ``parent`` cannot be listed.
    """
    try:
        names = sorted(os.listdir(parent))
    except OSError as error:
        raise _unusable(parent, error) from error
    swept = [name for name in names if _FOLDER.fullmatch(name) and _sweep_one(parent / name)]
    if swept:
        logger.info(
            "removed what %s left in %s: %s",
            "1 process that has ended" if len(swept) == 1 else f"{len(swept)} processes that have ended",
            parent,
            ", ".join(swept),
        )
    return swept


def _sweep_one(path: Path) -> bool:
    try:
        fd = os.open(path, _OPEN_FOLDER)
    except OSError:  # a link, a file, another user's, or gone
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return False
        locked = lock_if_gone(_OWNER, fd)
        if locked is None:
            return False
        owner, owner_fd = locked
        try:
            return path.name == f"shoal-offload-{owner.job}-rank{owner.rank}" and _empty(path, fd)
        finally:
            os.close(owner_fd)
    finally:
        os.close(fd)


def _empty(path: Path, fd: int) -> bool:
    """Remove the files of our names, the owner's last, and the folder if nothing else is in it."""
    try:
        ours = [name for name in os.listdir(fd) if _FILE.fullmatch(name) and name != _OWNER]
        for name in ours:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        others = [name for name in os.listdir(fd) if name != _OWNER]
        if others:  # the owner's file stays, so that a later start can clear the rest away
            logger.warning("%s is kept, because it contains other files: %s", path, ", ".join(others[:8]))
            return False
        with suppress(FileNotFoundError):
            os.unlink(_OWNER, dir_fd=fd)
        os.rmdir(path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
        return False
    return True


def _unusable(parent: Path, error: OSError) -> TierError:
    return TierError(
        f"the folder for offloaded state cannot be used: {error.strerror or error}.",
        where=str(parent),
        do="name an existing folder on a local disk and that this user may write to (nvme_path).",
        code="tier-folder",
    )
