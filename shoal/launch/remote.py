"""A job on several machines: on each one command, which starts that machine's ranks. By ssh, ended together.

    launcher --ssh -tt--> HOST: cd FOLDER && env NAME=VALUE ... COMMAND
             ---------->  COMMAND, on the machine that the launcher is on

Each command's output goes to the terminal as it comes. When one fails, or the launcher is gone, the others are
ended: a connection that closes hangs its command up, and a command that is hung up ends its ranks.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from shoal.errors import UsageError
from shoal.launch.local import CHILD, Outcome

_END_SECONDS = 20  # from the signal that asks a command to end until the one that it cannot refuse
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class RemoteJob:
    """The commands of the machines.

    Args:
        commands: of each machine, by its name for ssh.
        here: the machines that are this one: their commands need no ssh.
        folder: where each command begins; the same on all machines.
        environment: variables for the commands.
        ssh_options: such as ``("-p", "2222")``.
    """

    commands: Mapping[str, Sequence[str]]
    here: frozenset[str]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh_options: Sequence[str] = ()


class _StoppedError(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def run_remote(job: RemoteJob) -> Outcome:
    """Run the commands to their end. When one fails, or a signal comes, the others are ended.

    Raises: UsageError: there is no ``ssh``.
    """
    ssh = shutil.which("ssh")
    if ssh is None and set(job.commands) - job.here:
        raise UsageError(
            "other machines are reached by ssh, but no ssh program was found.",
            do="install OpenSSH's client; or start the command on every machine with --no_ssh and --node_rank.",
            code="launch-ssh",
        )
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with _signals_raise():
            for host, command in job.commands.items():
                running[host] = subprocess.Popen(_command_line(job, host, command, ssh or "ssh"))
            while running:
                for host in [host for host, process in running.items() if process.poll() is not None]:
                    code = running.pop(host).returncode
                    if code:
                        report = f"shoal: {host} failed first, with exit code {code}; the other machines were ended."
                        return Outcome(128 - code if code < 0 else code, report)
                time.sleep(_LOOK_SECONDS)
        return Outcome(0)
    except _StoppedError as stop:
        name = signal.Signals(stop.number).name
        return Outcome(128 + stop.number, f"shoal: stopped by {name}; so were all {len(job.commands)} machines.")
    finally:
        _end(list(running.values()))


def _command_line(job: RemoteJob, host: str, command: Sequence[str], ssh: str) -> list[str]:
    variables = [f"{name}={value}" for name, value in job.environment.items()]
    tied = [sys.executable, "-I", "-S", str(CHILD), str(os.getpid())]  # it ends with the launcher, even by SIGKILL
    if host in job.here:
        return [*tied, *variables, "--", *command]
    there = f"cd {shlex.quote(job.folder)} && exec {shlex.join(['env', *variables, *command])}"
    # A terminal, so that the command is hung up when the connection closes; no interactive questions.
    return [*tied, "--", ssh, "-tt", "-o", "BatchMode=yes", *job.ssh_options, "--", host, there]


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Signals that ask for an end are an exception inside the block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _StoppedError(number)

    numbers = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if sys.platform != "win32" else [])
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
