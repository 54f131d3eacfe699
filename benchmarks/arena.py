"""Contenders measured in turn: each in processes of its own that live through the whole run and idle while others run.

In every round each contender runs a few steps (A B C, A B C, ...), so that what the machine does meanwhile falls on all
alike. A sample during which other processes used the machine's cores is marked as loud.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.contenders import CONTENDERS, Task

ROOT = Path(__file__).resolve().parent.parent  # of the working tree
LOUD_CORES = 0.15  # others' use of the cores, above which a sample is loud
START_SECONDS = 900.0  # DeepSpeed compiles an operator the first time


class ContenderError(RuntimeError):
    """A contender's process failed; the message holds its traceback."""


@dataclass
class Result:
    """What one contender showed: seconds of each step (the slowest rank's), and memory of the largest rank."""

    contender: str
    quiet: list[float] = field(default_factory=list)
    loud: list[float] = field(default_factory=list)
    in_order: list[float] = field(default_factory=list)  # all of them, as they were taken
    peak_bytes: int = 0
    own_bytes: int = 0
    once_bytes: int = 0  # the peak, with memory shared by n ranks counted as 1/n
    shared_bytes: int = 0
    imported_bytes: int = 0
    host_peak_bytes: int = 0
    host_seconds: dict[str, float] = field(default_factory=dict)  # per step, where Shoal updates on the host
    loss: float = float("nan")
    error: str = ""

    @property
    def seconds(self) -> list[float]:
        """The steps that count: the quiet ones, where there are enough of them."""
        return self.quiet if len(self.quiet) >= 5 else self.quiet + self.loud

    def as_dict(self, reference: float | None) -> dict[str, Any]:
        if self.error:
            return {"contender": self.contender, "error": self.error}
        low, high = min(self.seconds), max(self.seconds)
        return {
            "contender": self.contender,
            "ms": round(1e3 * median(self.seconds), 2),
            "ms_min": round(1e3 * low, 2),
            "ms_max": round(1e3 * high, 2),
            "ratio": round(median(self.seconds) / reference, 4) if reference else None,
            "steps": len(self.seconds),
            "quiet_steps": len(self.quiet),
            "peak_mib": round(self.peak_bytes / 2**20, 1),
            "own_mib": round(self.own_bytes / 2**20, 1),
            "once_mib": round(self.once_bytes / 2**20, 1),
            "shared_mib": round(self.shared_bytes / 2**20, 1),
            "imported_mib": round(self.imported_bytes / 2**20, 1),
            "host_peak_mib": round(self.host_peak_bytes / 2**20, 1),
            "host_seconds": {key: round(value, 4) for key, value in self.host_seconds.items()},
            "loss": round(self.loss, 4),
        }


@dataclass(frozen=True)
class Host:
    """Where one rank runs: the command that enters it, and what its environment has in place of this machine's."""

    enter: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Team:
    """The processes of one contender.

    Args:
        deadline: of ``time.monotonic()``, after which no answer is waited for; None: as long as is usual.
        root: the folder that holds the ``shoal`` to measure; None: the working tree.
        hosts: of each rank; none: this machine.
    """

    def __init__(
        self,
        contender: str,
        task: Task,
        ranks: int,
        deadline: float | None = None,
        *,
        root: Path | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.contender = contender
        self._deadline = deadline
        self.size = 1 if CONTENDERS[contender].alone else ranks
        port = _free_port()
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        for rank in range(self.size):
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
            host = hosts[rank] if hosts else Host()
            process = subprocess.Popen(
                [
                    *host.enter,
                    sys.executable,
                    "-P",
                    "-m",
                    "benchmarks.worker",
                ],  # -P: no modules from the current folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=_environment(rank, self.size, port, task.threads, root, task.device) | host.environment,
                start_new_session=True,
            )
            self._processes.append(process)
            self._logs.append(log)
        self._tell({"contender": contender, "task": task.as_dict()})

    def wait_until_ready(self) -> list[dict[str, Any]]:
        return self._hear(START_SECONDS)

    def run(self, steps: int) -> tuple[list[dict[str, Any]], float]:
        """Run some steps on all ranks: the ranks' answers, and how many cores other processes used meanwhile."""
        busy, begin = _busy_seconds(), time.perf_counter()
        self._tell({"steps": steps})
        answers = self._hear(300.0)
        wall = time.perf_counter() - begin
        # The steps' own use; the one warm step before them is taken to cost as much as each of them.
        own = sum(answer["cpu_seconds"] for answer in answers) * (steps + 1) / steps
        return answers, max(0.0, (_busy_seconds() - busy - own) / wall)

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Every rank's answer to one of the requests of ``benchmarks.worker``."""
        self._tell(request)
        return self._hear(300.0)

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")

    def _hear(self, seconds: float) -> list[dict[str, Any]]:
        answers = []
        deadline = time.monotonic() + seconds
        if self._deadline is not None:
            deadline = min(deadline, self._deadline)
            seconds = max(0.0, deadline - time.monotonic())
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            silence = "ended" if ready else f"no answer within {seconds:.0f} s"
            answer = json.loads(line) if line else {"error": silence}
            if "error" in answer:
                self._logs[rank].seek(0)
                tail = "".join(self._logs[rank].readlines()[-20:])
                raise ContenderError(f"{self.contender}, rank {rank}: {answer['error']}\n{tail}")
            answers.append(answer)
        return answers


def compete(
    contenders: Sequence[str],
    task: Task,
    ranks: int,
    *,
    rounds: int,
    steps: int,
    most_rounds: int = 0,
    deadline: float | None = None,
) -> dict[str, Result]:
    """Measure contenders in turn.

    Args:
        rounds: samples of each contender.
        steps: steps in a sample, after one that is not counted.
        most_rounds: go on, up to so many rounds, until every contender has ``rounds * steps`` quiet steps.
        deadline: of ``time.monotonic()``: a contender that has not answered by then has failed, unless it had a round.
    """
    results = {name: Result(name) for name in contenders}
    teams: dict[str, Team] = {}
    try:
        for name in contenders:
            team = Team(name, task, ranks, deadline)
            teams[name] = team
            try:
                ready = team.wait_until_ready()
            except ContenderError as error:
                results[name].error = str(error)
                teams.pop(name).close()
                continue
            results[name].imported_bytes = max(answer["imported_bytes"] for answer in ready)
        for number in range(max(rounds, most_rounds)):
            if number >= rounds and all(len(results[name].quiet) >= rounds * steps for name in teams):
                break
            for name, team in list(teams.items()):
                try:
                    answers, others = team.run(steps)
                except ContenderError as error:
                    is_late = deadline is not None and time.monotonic() >= deadline and results[name].seconds
                    results[name].error = "" if is_late else str(error)
                    teams.pop(name).close()
                    continue
                result = results[name]
                slowest = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
                result.in_order += slowest
                (result.loud if others > LOUD_CORES else result.quiet).extend(slowest)
                result.peak_bytes = max(answer["peak_bytes"] for answer in answers)
                result.host_peak_bytes = max(answer["host_peak_bytes"] for answer in answers)
                host = answers[0]["host_seconds"]
                result.host_seconds = {key: value / steps for key, value in host.items()}
                result.own_bytes = max(answer["own_bytes"] for answer in answers)
                result.once_bytes = max(answer["once_bytes"] for answer in answers)
                result.shared_bytes = max(answer["shared_bytes"] for answer in answers)
                result.loss = sum(answer["loss"] for answer in answers) / len(answers)
    finally:
        for team in teams.values():
            team.close()
    return results


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "load_at_start": [round(value, 2) for value in os.getloadavg()],
    }


def available_bytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def reason(error: str) -> str:
    """The line of a traceback that names the error."""
    lines = error.strip().splitlines()
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines)[-1].strip()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text, the first a heading; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _environment(
    rank: int, size: int, port: int, threads: int, root: Path | None = None, device: str = "cpu"
) -> dict[str, str]:
    """The environment of one rank: its threads, the rendezvous, and the interpreter's tools (ninja) on the path."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": device,
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in (root, ROOT) if folder is not None),
    }


def _busy_seconds() -> float:
    """Processor seconds that the machine has spent, all cores together, but for waiting."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
