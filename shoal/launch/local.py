"""Ranks on this machine, all of a job's or its part: processes of one program through TorchElastic, ended together.

    launcher --TorchElastic--> child.py --exec--> program, rank 0
                          \\--> child.py --exec--> program, rank 1 ...

Every rank's output goes to a file and from there to the terminal, each line with its rank. When ranks fail, the others
are ended, and the outcome carries the traceback of the one that failed first.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.launch.cores import BoundCores
from shoal.launch.environment import read_environment

CHILD = Path(__file__).with_name("child.py")
_MEETING_SECONDS = 900  # until all machines of a job are there
_LAST_CALL_SECONDS = 10  # for more machines, once there are as many as an elastic job needs
_TAIL_LINES = 60
# Errors of a rank whose peer ended; it is not the rank that failed first.
_MARKS_OF_A_LOST_PEER = ("[rank-failed]", "Connection closed by peer", "Connection reset by peer", "ncclRemoteError")


@dataclass(frozen=True)
class Place:
    """This machine among those of a job.

    Args:
        node_rank: its number; machine 0 listens at ``address`` and ``port`` for the others, who wait for it.
        num_nodes: machines in all. They may have different numbers of ranks.
    """

    node_rank: int
    num_nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class Elastic:
    """A job whose ranks are all started anew, where one fails, and where machines come or go; the program loads its
    last checkpoint.

    Args:
        min_nodes: with fewer machines it waits for more. The job's ``Place`` says how many there are at most; machine
            0, where they meet, has to be there all the time.
        max_restarts: after so many failures the job fails; machines that come or go are none.
    """

    min_nodes: int = 1
    max_restarts: int = 100


@dataclass(frozen=True)
class LocalJob:
    """The program to run, the number of ranks, and the use of the terminal.

    Args:
        program: the command line of one rank, e.g. ``(sys.executable, "train.py", "--steps", "10")``.
        num_ranks: processes to start; at least 1.
        rank_0_keeps_terminal: rank 0's stdout is the terminal itself (a progress bar needs one), and of the other
            ranks only a failure is printed.
        environment: variables for the ranks, beside those that this process has.
        place: this machine's part of a job on several; None: there is this one.
        elastic: None: when a rank fails, the job has failed.
        cores: None: ranks run on any.
        stop_seconds: from the signal that asks ranks to end until the one that they cannot refuse.
    """

    program: Sequence[str]
    num_ranks: int
    rank_0_keeps_terminal: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    elastic: Elastic | None = None
    cores: BoundCores | None = None
    stop_seconds: int = 5


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    ``exit_code`` is 0, or that of the rank that failed first (128 + n where signal n ended it), or 128 + n where
    signal n ended the launcher. ``report`` says so, with the first failing rank's traceback; empty after a success.
    """

    exit_code: int
    report: str = ""


def run_local(job: LocalJob) -> Outcome:
    """Run the job to its end. No rank keeps running, however the job ends.

    Raises: UsageError: fewer than 1 rank, or more ranks than there are visible accelerators.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if job.num_ranks < 1:
        raise UsageError(f"{job.num_ranks} ranks: a job needs at least 1.", do="give --ranks a positive number.")
    _check_devices(job.num_ranks)
    ranks = range(job.num_ranks)
    keep = dict.fromkeys(ranks, Std.ALL)
    show = dict.fromkeys(ranks, Std.NONE if job.rank_0_keeps_terminal else Std.ALL)
    if job.rank_0_keeps_terminal:
        keep[0] = show[0] = Std.ERR
    log_dir = Path(tempfile.mkdtemp(prefix="shoal-run-"))
    config = LaunchConfig(
        nproc_per_node=job.num_ranks,
        **_rendezvous(job.place, job.elastic),
        max_restarts=job.elastic.max_restarts if job.elastic is not None else 0,
        monitor_interval=0.1,
        **_shutdown(LaunchConfig, job.stop_seconds),
        log_line_prefix_template="[rank ${rank}] ",
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects=keep, tee=show),
    )
    assignments = {"PYTHONUNBUFFERED": "1", **_threads(job), **job.environment}
    bound = ["--cores", ";".join(",".join(map(str, cpus)) for cpus in job.cores.cpus)] if job.cores else []
    arguments = [
        *("-I", "-S", str(CHILD), str(os.getpid()), *bound),
        *(f"{name}={value}" for name, value in assignments.items()),
        *("--", *job.program),
    ]
    try:
        with (
            _quiet_torchelastic() if job.elastic is None else nullcontext()
        ):  # it logs failures after which ranks are restarted
            elastic_launch(config, sys.executable)(*arguments)
        return Outcome(0)
    except ChildFailedError as error:
        codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        numbers = {failure.local_rank: rank for rank, failure in error.failures.items()}
        first = _first_failed(codes, log_dir)
        return Outcome(_shell_code(codes[first]), _describe_failure(first, numbers[first], codes[first], log_dir))
    except SignalException as error:
        report = f"shoal: stopped by {error.sigval.name}; all {job.num_ranks} ranks have ended."
        return Outcome(128 + int(error.sigval), report)
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _rendezvous(place: Place | None, elastic: Elastic | None) -> dict[str, Any]:
    if elastic is not None:
        from shoal.launch.rounds import register

        backend = register()
    if place is None:
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": "c10d" if elastic is None else backend,
            "rdzv_endpoint": "127.0.0.1:0",
            "rdzv_configs": {"is_host": True},
            "local_addr": "127.0.0.1",  # a machine's own name need not resolve
        }
    if elastic is None:
        return {
            "min_nodes": place.num_nodes,
            "max_nodes": place.num_nodes,
            "run_id": "shoal",
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{place.address}:{place.port}",
            "rdzv_configs": {"rank": place.node_rank, "timeout": _MEETING_SECONDS},
        }
    is_host = place.node_rank == 0
    return {
        "min_nodes": elastic.min_nodes,
        "max_nodes": place.num_nodes,
        "run_id": "shoal",
        "rdzv_backend": backend,
        "rdzv_endpoint": f"{place.address}:{place.port}",
        "rdzv_configs": {
            "is_host": is_host,
            "join_timeout": _MEETING_SECONDS,
            "last_call_timeout": _LAST_CALL_SECONDS,
            "read_timeout": _MEETING_SECONDS,  # machine 0 may come last
        },
        "local_addr": place.address if is_host else _own_address(place),
    }


def _own_address(place: Place) -> str | None:
    """This machine's address in the network of machine 0, by which others reach its ranks; None: no route yet."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((place.address, place.port))  # sends nothing
            address: str = way.getsockname()[0]
            return address
    except OSError:
        return None


def _shutdown(config: type[Any], seconds: int) -> dict[str, Any]:
    """How long ranks may take to end. Older torch has no such setting and waits for 30 seconds."""
    has_timeout = "shutdown_timeout" in {field.name for field in dataclasses.fields(config)}
    return {"shutdown_timeout": seconds} if has_timeout else {}


def _threads(job: LocalJob) -> dict[str, str]:
    """The cores divided among the ranks, unless the user has set the number of threads of a rank."""
    if read_environment().num_threads is not None:
        return {}
    if job.cores is not None:
        return {"OMP_NUM_THREADS": str(job.cores.num_threads)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // job.num_ranks))}


def _check_devices(num_ranks: int) -> None:
    visible = read_environment().visible_devices
    if visible and len(visible) < num_ranks:
        raise UsageError(
            f"{num_ranks} ranks, but CUDA_VISIBLE_DEVICES={','.join(visible)} shows {len(visible)} devices.",
            do=f"start {len(visible)} ranks, or make more devices visible; hide all of them to run on CPU.",
        )


@contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Suppress TorchElastic's own report of a failure: the ranks' output and one traceback are enough."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_failed(codes: Mapping[int, int], log_dir: Path) -> int:
    """The rank that failed first: not because a peer ended, and not ended by the launcher.

    Args:
        codes: in the order in which the ranks were found to have ended.
    """

    order = list(codes)  # those that had ended before the launcher ended the others come first

    def key(rank: int) -> tuple[bool, bool, float, int]:
        log = _stderr_of(rank, log_dir)
        text = log.read_text(errors="replace") if log is not None else ""
        ended_by_launcher = codes[rank] == -signal.SIGTERM and "Traceback" not in text
        is_witness = any(mark in text for mark in _MARKS_OF_A_LOST_PEER)
        last_word = log.stat().st_mtime if log is not None and not ended_by_launcher else float("inf")
        return ended_by_launcher, is_witness, last_word, order.index(rank)

    return min(codes, key=key)


def _describe_failure(local_rank: int, rank: int, code: int, log_dir: Path) -> str:
    log = _stderr_of(local_rank, log_dir)
    text = log.read_text(errors="replace") if log is not None else ""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = _last_traceback(text.splitlines())
    return "\n".join([f"shoal: rank {rank} failed first: it {how}.", *(lines or ["It wrote nothing to stderr."])])


def _last_traceback(lines: Sequence[str]) -> Sequence[str]:
    """From the last uncaught exception's first line (its causes included) to the end; or the last lines."""
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return lines[-_TAIL_LINES:]
    start = starts[-1]
    links = ("The above exception was the direct cause", "During handling of the above exception")
    for earlier, later in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if not any(line.startswith(links) for line in lines[earlier:later]):
            break
        start = earlier
    return lines[start:]


def _stderr_of(rank: int, log_dir: Path) -> Path | None:
    """Of the last attempt."""
    found = {int(path.parts[-3].rpartition("_")[2]): path for path in log_dir.glob(f"*/attempt_*/{rank}/stderr.log")}
    return found[max(found)] if found else None


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
