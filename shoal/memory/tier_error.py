"""The errors of the disk tier, each made in one place: what failed, which file, which bytes, how much room there is."""

from __future__ import annotations

import errno
import os

from shoal.errors import OutOfMemoryError, ShoalError, TierError
from shoal.text import format_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(needed_nbytes: int, available_nbytes: int, *, where: str, what: str = "") -> OutOfMemoryError:
    """The disk has less room than is needed."""
    return OutOfMemoryError(
        f"{what or 'the disk is too full'}: {format_bytes(needed_nbytes)} ({needed_nbytes} bytes) are needed, "
        f"{format_bytes(available_nbytes)} ({available_nbytes} bytes) are available.",
        where=where,
        do="free space, name another folder (nvme_path), or offload less to it.",
        code="tier-no-room",
    )


def failed(cause: OSError, doing: str, *, path: str, start: int, nbytes: int) -> ShoalError:
    """A system call failed while ``nbytes`` at ``start`` of ``path`` were read or written."""
    where = f"{path}, {nbytes} bytes at offset {start}"
    if cause.errno in NO_ROOM:
        return no_room(
            nbytes,
            free_nbytes(os.path.dirname(path)),
            where=where,
            what=f"{doing} failed ({cause.strerror})",
        )
    return TierError(
        f"{doing} failed: {cause.strerror or cause}.",
        where=where,
        do="look at the system's log (dmesg) for the device, and at who else changes the folder. "
        "Resume from the last checkpoint.",
        code="tier-io",
    )


def too_short(path: str, *, start: int, nbytes: int, found_nbytes: int) -> TierError:
    """The file ends before the bytes that were written to it."""
    return TierError(
        f"the file ends at {found_nbytes}, but bytes up to {start + nbytes} were written to it.",
        where=f"{path}, {nbytes} bytes at offset {start}",
        do="find out what truncates files in this folder; nothing else may write to it. "
        "Resume from the last checkpoint.",
        code="tier-truncated",
    )


def free_nbytes(folder: str) -> int:
    """Bytes that this user may still write to the file system of ``folder``; 0 where it cannot be asked."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
