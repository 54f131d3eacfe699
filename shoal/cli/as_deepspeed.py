"""The command line for scripts that ``import deepspeed``: run them, or make the name an alias of Shoal everywhere."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.compat.environment import SWITCH, for_local_children, whole_for_children
from shoal.errors import UsageError
from shoal.launch import LocalJob

PTH_NAME = "shoal-as-deepspeed.pth"
PTH_LINE = (
    f'import os; os.environ.get("{SWITCH}") == "1" and '
    '__import__("shoal.compat.finder", fromlist=["install"]).install(children=False)\n'
)
# DeepSpeed's own programs, and the modules that do what they do; one that is installed is run as it is.
PROGRAMS = {
    "deepspeed": "deepspeed.launcher.runner",
    "ds": "deepspeed.launcher.runner",
    "ds_report": "deepspeed.env_report",
}


def job_as_deepspeed(script: str, arguments: Sequence[str], *, is_module: bool, ranks: int) -> LocalJob:
    """The ranks of a script for which ``import deepspeed`` is Shoal."""
    name = ["-m", script] if is_module else [script]
    program = [sys.executable, "-m", "shoal.compat.deepspeed", *name, *arguments]
    return LocalJob(program, ranks, environment=for_local_children())


def is_command(script: str) -> bool:
    """True for a program (``accelerate``, ``torchrun``, ``deepspeed``) that is not a file in the current folder."""
    is_known = script in PROGRAMS or _program(script) is not None
    return os.sep not in script and not Path(script).exists() and is_known


def _program(name: str) -> str | None:
    """The program's path, from PATH or from this environment, which need not be activated."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


def become_command(command: str, arguments: Sequence[str], ranks: int | None) -> None:
    """Become a launcher in whose ranks ``import deepspeed`` is Shoal. Does not return.

    Raises: UsageError: ``ranks`` was given: the command starts ranks of its own.
    """
    if ranks is not None:
        raise UsageError(
            f"--ranks {ranks} before the command {command!r}, which starts ranks itself.",
            do=f"leave --ranks out and tell {command} how many.",
            code="as-deepspeed-ranks",
        )
    program, words = _program(command), [command]
    if program is None and command in PROGRAMS:
        program, words = sys.executable, [sys.executable, "-m", "shoal.compat.deepspeed", "-m", PROGRAMS[command]]
    os.execve(program or command, [*words, *arguments], whole_for_children())


def as_deepspeed(
    enable: Annotated[bool, typer.Option("--enable", help=f"Write {PTH_NAME} to this environment.")] = False,
    disable: Annotated[bool, typer.Option("--disable", help="Remove that file.")] = False,
) -> None:
    """Make `import deepspeed` Shoal wherever SHOAL_AS_DEEPSPEED=1 is set: notebooks, Ray workers, any launcher.

    With --enable each interpreter of this environment reads that variable when it starts (a line in a .pth file),
    and does nothing without it. `shoal run --as-deepspeed` needs none of this.
    """
    path = Path(sysconfig.get_paths()["purelib"]) / PTH_NAME
    if enable == disable:
        state = "enabled" if path.is_file() else "not enabled"
        print(f"{state} in this environment ({path}); --enable or --disable changes it.")
    elif enable:
        path.write_text(PTH_LINE, encoding="ascii")
        print(f"wrote {path}: with {SWITCH}=1, `import deepspeed` is Shoal in this environment.")
    elif path.is_file():
        path.unlink()
        print(f"removed {path}: `import deepspeed` is no longer Shoal in this environment.")
    else:
        print(f"nothing to remove: there is no {path}.")
