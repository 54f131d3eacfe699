"""The variables that pass the alias on to child processes, and those that name the first rank.

    SHOAL_AS_DEEPSPEED   "1": an interpreter that starts with it, and with ``startup`` on its path, installs the alias
    PYTHONPATH           has ``startup`` at its front, whose ``sitecustomize`` is run when an interpreter starts
    PATH                 on this machine, has ``programs`` at its front: ``deepspeed``, ``ds``, ``ds_report``
    SHOAL_PYTHON         the interpreter that these commands run
    RANK, LOCAL_RANK     the process with 0 is the first

This is the one file of Shoal that writes to the environment: child processes inherit nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import ConfigError

SWITCH = "SHOAL_AS_DEEPSPEED"
EXPORTED = ("NCCL", "GLOO", "UCX", "MV2", "PYTHON", "MLFLOW", "SHOAL", "OMP")  # more than DeepSpeed's own list
STARTUP = os.path.join(os.path.dirname(os.path.realpath(__file__)), "startup")
PROGRAMS = os.path.join(os.path.dirname(os.path.realpath(__file__)), "programs")


def is_asked_for(variables: Mapping[str, str] | None = None) -> bool:
    """True if the environment asks for the alias."""
    return (os.environ if variables is None else variables).get(SWITCH) == "1"


def launched_ranks() -> int:
    """The number of ranks that the launcher started, by its variables; 0 without such variables."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 0


def for_children(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that install the alias in child processes too."""
    now = (os.environ if variables is None else variables).get("PYTHONPATH", "")
    others = [part for part in now.split(os.pathsep) if part and part != STARTUP]
    return {SWITCH: "1", "PYTHONPATH": os.pathsep.join([STARTUP, *others])}


def for_local_children() -> dict[str, str]:
    """Those variables, and those by which child processes on this machine find DeepSpeed's commands."""
    others = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != PROGRAMS]
    return {**for_children(), "SHOAL_PYTHON": sys.executable, "PATH": os.pathsep.join([PROGRAMS, *others])}


def whole_for_children() -> dict[str, str]:
    """This process's environment with those variables in it."""
    return {**os.environ, **for_local_children()}


def tell_children() -> dict[str, str | None]:
    """Set these variables. Returns: their values before, for ``restore``."""
    wanted = for_local_children()
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    return before


def restore(before: Mapping[str, str | None]) -> None:
    """Undo ``tell_children``."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_first_rank() -> bool:
    """True in the process that logs for all ranks."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) in ("", "0")


def visible_devices() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES; None: not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def showing(chosen: Sequence[int | str], devices: Sequence[int | str]) -> dict[str, str]:
    """What shows ranks the ``chosen`` of this machine's visible devices; nothing where these come first as it is."""
    if list(chosen) == list(devices[: len(chosen)]):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen))}


def local_rank() -> str | None:
    """This process's number on its machine, from the launcher's variables."""
    return os.environ.get("LOCAL_RANK")


def local_size() -> int | None:
    """The number of ranks on this machine, from the launcher's or the user's variables."""
    text = os.environ.get("LOCAL_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def file_of_variables() -> str:
    """The name of the file in which DeepSpeed's users keep variables for several machines."""
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def exported(folders: Sequence[Path]) -> dict[str, str]:
    """The variables that are copied to other machines: those with the prefixes of ``EXPORTED``, then the file's.

    Args:
        folders: where the file is looked for; a later folder's file wins. A name that is a whole path is read directly.

    Raises: ConfigError: a line that is not NAME=VALUE.
    """
    from shoal.comm.environment import QUORUM_TOKEN

    variables = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    variables.pop(QUORUM_TOKEN, None)  # a command line can be read by others
    name = Path(file_of_variables())
    for path in [name] if name.is_absolute() else [folder / name for folder in folders]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            key, equals, value = text.partition("=")
            if not equals or not key.isidentifier():
                raise ConfigError(f"{path}, line {number}: {text!r} is not NAME=VALUE.", code="launch-variables")
            variables[key] = value
    return variables
