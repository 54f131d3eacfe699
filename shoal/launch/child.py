"""The start of a rank: make it end with the launcher, set its environment, then execute its program.

Run by path, ``python -I -S child.py LAUNCHER_PID [--cores CPU,...;...] NAME=VALUE... -- PROGRAM ARGS...``, so it
imports next to nothing. ``--cores`` lists the CPUs of each rank of this machine, which is then bound to its own.
``heartbeat.read_starts`` reads which process the rank is, and since when.
The kernel then ends the rank when the launcher ends, even by SIGKILL; this stays in effect after ``exec``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    separator = arguments.index("--")
    launcher = int(arguments[0])
    environment = dict(os.environ)
    assignments = arguments[1:separator]
    if assignments[:1] == ["--cores"]:
        cpus = assignments[1].split(";")[int(environment["LOCAL_RANK"])]
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
        assignments = assignments[2:]
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        environment[name] = value
    program = arguments[separator + 1 :]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it went before the tie was made
            sys.exit(1)
        if "SHOAL_HEARTBEATS" in environment:  # not the launcher of one machine of several
            _write_start(environment)
    os.execvpe(program[0], program, environment)


def _write_start(environment: dict[str, str]) -> None:
    with open("/proc/self/stat") as file:
        ticks = file.read().rpartition(")")[2].split()[19]
    rank, limit = environment["RANK"], environment["SHOAL_INIT_SECONDS"]
    with open(f"{environment['SHOAL_HEARTBEATS']}/start-{environment['LOCAL_RANK']}", "w") as file:
        file.write(f"{rank} {os.getpid()} {ticks} {time.monotonic()} {limit}")


if __name__ == "__main__":
    main(sys.argv[1:])
