"""Which process is meant: a number is used again, a start of it is not. The kernel is asked, never a clock."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def started(pid: int) -> int | None:
    """When the process started, in ticks since boot; None: it has ended (a zombie has), or the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot() -> str:
    """One start of one kernel and one namespace of processes: hosts may share a name, and a pid is one only here."""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{start}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def has_process(pid: int) -> bool:
    """May a process have this number now? Who cannot be asked counts as there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True
