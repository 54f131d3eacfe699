"""Ranks on this machine, all of a job's or its part: processes of one program through TorchElastic, ended together.

    launcher --TorchElastic--> child.py --exec--> program, rank 0
                          \\--> child.py --exec--> program, rank 1 ...

Every rank's output goes to a file and from there to the terminal, each line with its rank (``output.py``). When ranks
fail, the others are ended, and the outcome carries the error of the one that failed first (``failure.py``). When they
hang, all are ended, and it carries their stacks (``hang.py``).
"""

from __future__ import annotations

import ast
import dataclasses
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shoal.comm.environment import HEARTBEATS, INIT_SECONDS, init_seconds
from shoal.comm.interface import own_address
from shoal.errors import UsageError
from shoal.launch.cores import BoundCores
from shoal.launch.environment import read_environment
from shoal.launch.failure import EndedRank, describe, errors_of, stderr_of
from shoal.launch.hang import HangWatch
from shoal.launch.output import RankOutput
from shoal.processor import num_cores

DEFAULT_PORT = 29500  # where node 0 listens for the others
CHILD = Path(__file__).with_name("child.py")
_MEETING_SECONDS = 900  # until all machines of a job are there
_TRACEBACK = "Traceback (most recent call last):"
_INITIALIZES = re.compile(r"\b(?:shoal|deepspeed)\.(?:initialize|init_distributed)\(")
_DEFAULT_INIT_SECONDS = 3600.0  # as ``timeouts.init``
_MOST_PLACES = 2  # of a job that was interrupted, as a report shows them
_LAST_CALL_SECONDS = 10  # for more machines, once there are as many as an elastic job needs


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
        environment: variables for the ranks, in addition to this process's.
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
    signal n ended the launcher. ``report`` says so, with the first failing rank's error; empty after a success.
    """

    exit_code: int
    report: str = ""

    @property
    def brief(self) -> str:
        """The report in a line: who failed, and the error; of a traceback its last line."""
        lines = [line.strip() for line in self.report.splitlines() if line.strip()]
        return " ".join([*lines[:1], *(lines[-1:] if lines[1:2] == [_TRACEBACK] else lines[1:2])])


def run_local(job: LocalJob) -> Outcome:
    """Run the job to its end. No rank keeps running, however the job ends.

    Raises: UsageError: fewer than 1 rank, more ranks than there are visible accelerators, or a port that is in use.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from shoal.launch.torchelastic import FollowedFiles, SameFailureError

    if job.num_ranks < 1:
        raise UsageError(f"{job.num_ranks} ranks: a job needs at least 1.", do="give --ranks a positive number.")
    _check_devices(job.num_ranks)
    _check_port(job)
    log_dir = Path(tempfile.mkdtemp(prefix="shoal-run-"))
    heartbeats = log_dir / "heartbeats"
    heartbeats.mkdir(mode=0o700)
    output = RankOutput(sys.stdout, sys.stderr)
    watch = HangWatch(heartbeats, log_dir, output)
    files = FollowedFiles(output, watch, log_dir, job.num_ranks, rank_0_keeps_terminal=job.rank_0_keeps_terminal)
    config = LaunchConfig(
        nproc_per_node=job.num_ranks,
        **_rendezvous(job.place, job.elastic),
        max_restarts=job.elastic.max_restarts if job.elastic is not None else 0,
        monitor_interval=0.1,
        **_shutdown(LaunchConfig, job.stop_seconds),
        logs_specs=files,
    )
    always = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", HEARTBEATS: str(heartbeats)}
    assignments = {**always, **_threads(job), INIT_SECONDS: str(_init_seconds(job.program)), **job.environment}
    bound = ["--cores", ";".join(",".join(map(str, cpus)) for cpus in job.cores.cpus)] if job.cores else []
    arguments = [
        *("-I", "-S", str(CHILD), str(os.getpid()), *bound),
        *(f"{name}={value}" for name, value in assignments.items()),
        *("--", *job.program),
    ]
    try:
        with output, watch, _quiet_torchelastic(files.first_failure):
            try:
                elastic_launch(config, sys.executable)(*arguments)
            except ChildFailedError as error:
                output.end(withheld=[failure.local_rank for failure in error.failures.values()])
                ended = []
                for rank, failure in error.failures.items():
                    here, stderr = failure.local_rank, stderr_of(failure.local_rank, log_dir)
                    ended.append(EndedRank(rank, here, failure.exitcode, stderr, output.shown(here)))
                code, report = describe(ended, whole=read_environment().wants_tracebacks)
                return Outcome(code, watch.finish() or report)
            except SameFailureError as error:
                output.end()
                return Outcome(1, str(error))
            except SignalException as error:
                errors = errors_of(log_dir, job.num_ranks)
                interrupted = {rank: each for rank, each in errors.items() if each.error[:1] == ("KeyboardInterrupt",)}
                output.end(
                    withheld=[rank for rank, each in errors.items() if rank in interrupted or each.is_of_a_lost_peer]
                )
                report = f"shoal: stopped by {error.sigval.name}; all {job.num_ranks} ranks have ended."
                places = [f"\n  rank {rank} was at {each.place}" for rank, each in interrupted.items() if each.place]
                return Outcome(128 + int(error.sigval), report + "".join(places[:_MOST_PLACES]))
        return Outcome(0)
    finally:
        shutil.rmtree(log_dir, ignore_errors=True)


def _rendezvous(place: Place | None, elastic: Elastic | None) -> dict[str, Any]:
    if elastic is not None:
        from shoal.launch.torchelastic import register

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
        "local_addr": place.address if is_host else own_address(place.address, place.port),
    }


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
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // job.num_ranks))}


def _init_seconds(program: Sequence[str]) -> float:
    """How long a rank may take from its start to ``initialize``; 0: there is no limit, as where no call of it is in the
    script itself, which may be one that does not train.
    """
    if (seconds := init_seconds()) is not None:
        return seconds
    scripts = [Path(word) for word in program if word.endswith(".py") and Path(word).is_file()]
    is_for_training = any(_INITIALIZES.search(path.read_text("utf-8", "replace")) for path in scripts[:1])
    return _DEFAULT_INIT_SECONDS if is_for_training or "shoal.cli.training" in program else 0.0


def _check_devices(num_ranks: int) -> None:
    visible = read_environment().visible_devices
    if visible and len(visible) < num_ranks:
        raise UsageError(
            f"{num_ranks} ranks, but CUDA_VISIBLE_DEVICES={','.join(visible)} shows {len(visible)} devices.",
            do=f"start {len(visible)} ranks, or make more devices visible; hide all of them to run on CPU.",
        )


def _check_port(job: LocalJob) -> None:
    """Raises: UsageError: the port at which this machine is to listen for the other ranks is in use."""
    if job.place is not None:
        port = job.place.port if job.place.node_rank == 0 else None
    else:
        port = int(job.environment["MASTER_PORT"]) if "MASTER_PORT" in job.environment else None
    if port is None:
        return
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UsageError(
            f"port {port} of this machine, where rank 0 is to listen: {error.strerror}.",
            do="give another --master_port, or end the process that has it.",
        ) from None


@contextmanager
def _quiet_torchelastic(first_failure: logging.Filter) -> Iterator[None]:
    """Suppress TorchElastic's messages, which repeat what the outcome says. Each of its loggers has its own level.

    Args:
        first_failure: gets the errors about processes, and lets none pass.
    """
    of_processes = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    known = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {logger: logger.level for logger in map(logging.getLogger, known)}
    for logger in levels:
        logger.setLevel(logging.ERROR if logger is of_processes else logging.CRITICAL)
    of_processes.addFilter(first_failure)
    try:
        yield
    finally:
        of_processes.removeFilter(first_failure)
        for logger, level in levels.items():
            logger.setLevel(level)


# what can be known to be wrong with a script before ranks are started


def misplaced_ranks(script: str, args: Sequence[str]) -> str:
    """A sentence on ``--ranks`` after the script, which is the script's, if its source does not mention it."""
    given = next((arg for arg in args if arg.partition("=")[0] == "--ranks"), None)
    path = Path(script)
    if given is None or path.suffix != ".py" or "ranks" in path.read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f"shoal: {given} after {script} is an option of the script, which does not mention it. For the number of ranks"
        f" write: shoal run --ranks N {script} ..."
    )


def check_script(script: str, *, is_module: bool = False) -> None:
    """Raises: UsageError: there is no such file or module, or it is no Python."""
    if is_module:
        if PathFinder.find_spec(script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"there is no module {script!r}.")
        return
    path = Path(script)
    if not path.exists():
        raise UsageError(f"there is no file {script!r}.")
    if path.suffix != ".py" or not path.is_file():  # such as a folder with a __main__.py
        return
    try:
        ast.parse(path.read_bytes(), script)
    except SyntaxError as error:
        raise UsageError(f"{script}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
