"""The first breath of a rank: tie its life to the launcher's, set its environment, then become its program.

Run by path, ``python -I -S child.py LAUNCHER_PID NAME=VALUE... -- PROGRAM ARGS...``, so it imports next to nothing.
The kernel then ends the rank when the launcher is gone, were it even by SIGKILL; the tie outlives ``exec``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    cut = arguments.index("--")
    launcher = int(arguments[0])
    environment = dict(os.environ)
    for assignment in arguments[1:cut]:
        name, _, value = assignment.partition("=")
        environment[name] = value
    program = arguments[cut + 1 :]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it went before the tie was made
            sys.exit(1)
    os.execvpe(program[0], program, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
