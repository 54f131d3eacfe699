"""``deepspeed.utils.debug``: printing so that processes of one host do not write into each other's lines."""

from __future__ import annotations

import fcntl
import sys
from typing import Any

from shoal.comm.world import current_world


def printflock(*msgs: Any) -> None:
    """Print while holding a lock that the processes of this host share."""
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.stdout.write(" ".join(str(message) for message in msgs) + "\n")
        sys.stdout.flush()


def print_rank0(*msgs: Any, force: bool = False) -> None:
    """Print on rank 0. ``force``: on every rank."""
    if force or current_world().rank == 0:
        printflock(*msgs)


__all__ = ["print_rank0", "printflock"]
