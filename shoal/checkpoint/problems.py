"""The errors that checkpoints end in, and how every rank raises the same one."""

from __future__ import annotations

from typing import Any

from shoal.comm.protocol import Communicator
from shoal.errors import CheckpointError
from shoal.text import listed


def damaged(what: str, where: str) -> CheckpointError:
    """A checkpoint of Shoal's is not what was written."""
    do = "load another checkpoint; `shoal checkpoint verify` shows which are whole."
    return CheckpointError(what, where=where, do=do, code="checkpoint-damaged")


def damaged_copy(what: str, where: str) -> CheckpointError:
    """A file of another program's is cut off, missing, or not what was written."""
    do = "copy it once more from where it came, or load another checkpoint."
    return CheckpointError(what, where=where, do=do, code="checkpoint-damaged")


def unsafe(what: str, where: str) -> CheckpointError:
    """A file holds what its program never writes."""
    do = "do not trust this checkpoint; it was not written by the program that it names, or was changed since."
    return CheckpointError(what, where=where, do=do, code="checkpoint-unsafe")


def share(
    comm: Communicator, problem: BaseException | None, value: Any, label: str, *, code: str = "checkpoint"
) -> tuple[list[Any], list[tuple[int, CheckpointError]]]:
    """Every rank's value, and the problems of the ranks that have one.

    Args:
        code: of an ``OSError``.

    Communicates: one ``gather_objects``.
    """
    words = None
    if problem is not None:
        if not isinstance(problem, CheckpointError):
            kind = code if isinstance(problem, OSError) else "checkpoint"
            where, do = getattr(problem, "where", ""), getattr(problem, "do", "")
            problem = CheckpointError(f"{type(problem).__name__}: {problem}", where=where, do=do, code=kind)
        words = [problem.what, problem.where, problem.do, problem.code]
    mine = {"problem": words, "value": value}
    all_ranks = comm.gather_objects(mine, label=label)
    failed = []
    for rank, entry in enumerate(all_ranks):
        if entry["problem"] is not None:
            what, where, do, kind = entry["problem"]
            failed.append((rank, CheckpointError(what, where=where, do=do, code=kind)))
    return [entry["value"] for entry in all_ranks], failed


def agree(comm: Communicator, problem: Exception | None, value: Any, label: str) -> list[Any]:
    """Every rank's value. Raises: CheckpointError: on every rank, if some rank has a problem."""
    if comm.size == 1 and problem is not None:
        raise problem
    values, failed = share(comm, problem, value, label)
    if not failed:
        return values
    first = failed[0][1]
    found_by = f"found by rank {listed(str(rank) for rank, _ in failed)}" if len(failed) < comm.size else ""
    where = "; ".join(text for text in (first.where, found_by) if text)
    raise CheckpointError(first.what, where=where, do=first.do, code=first.code) from problem
