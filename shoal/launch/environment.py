"""The environment of a process that may start ranks: its threads, devices and heap settings.

Which rank a process is, ``shoal.comm.environment`` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.comm.environment import QUORUM_TOKEN, wants_tracebacks
from shoal.errors import UsageError

LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_LEVEL = "SHOAL_LOG_LEVEL"
# Variables of the libraries that ranks use; what else is in a user's environment (tokens, paths) stays there.
_PASSED_ON = ("NCCL_", "GLOO_", "UCX_", "FI_", "SHOAL_", "TORCH_NCCL_", "TORCH_LOGS", "PYTORCH_", "OMP_NUM_THREADS")
_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Environment:
    """The settings of this process."""

    num_threads: int | None  # OMP_NUM_THREADS
    visible_devices: tuple[str, ...] | None  # CUDA_VISIBLE_DEVICES; () hides all; None where unset
    wants_tracebacks: bool = False  # SHOAL_TRACEBACK: of Shoal's own errors, too


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or the one given. Raises: UsageError: OMP_NUM_THREADS is no number."""
    env = os.environ if variables is None else variables
    devices = env.get("CUDA_VISIBLE_DEVICES")
    return Environment(
        wants_tracebacks=wants_tracebacks(env),
        num_threads=_num_threads(env.get("OMP_NUM_THREADS", "").strip()),
        visible_devices=None if devices is None else tuple(name for name in devices.split(",") if name.strip()),
    )


def passed_on(given: Sequence[str], variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for ranks on other machines: those of ``_PASSED_ON``, and those that the user names.

    Args:
        given: ``NAME``, with its value here, or ``NAME=VALUE``.

    Raises: UsageError: a name that is not set here, that no variable can have, or that the launcher sets.

    >>> passed_on(["HF_TOKEN", "A=b c"], {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "AWS_KEY": "y"})
    {'NCCL_DEBUG': 'INFO', 'HF_TOKEN': 'x', 'A': 'b c'}
    """
    env = os.environ if variables is None else variables
    chosen = {name: value for name, value in env.items() if name.startswith(_PASSED_ON) and _is_name(name)}
    chosen.pop(QUORUM_TOKEN, None)  # what is submitted can be read by others
    for text in given:
        name, equals, value = text.partition("=")
        if not _is_name(name) or name in _OF_THE_LAUNCHER or name.startswith("PET_"):
            why = "the launcher sets it itself" if _is_name(name) else "it is no name of a variable"
            raise UsageError(f"--env {text!r}: {why}.", do="leave it out.", code="launch-cluster")
        if not equals and name not in env:
            raise UsageError(f"--env {name}: it is not set here.", do="write --env NAME=VALUE.", code="launch-cluster")
        chosen[name] = value if equals else env[name]
    return chosen


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier()


def heap_is_set(variables: Mapping[str, str] | None = None) -> bool:
    """True if it is set already how glibc's heap keeps freed memory.

    >>> heap_is_set({"MALLOC_TRIM_THRESHOLD_": "0"}), heap_is_set({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"})
    (True, False)
    """
    env = os.environ if variables is None else variables
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
    return any(name in env for name in names) or "glibc.malloc." in env.get("GLIBC_TUNABLES", "")


def log_level(variables: Mapping[str, str] | None = None) -> str | None:
    """The level that SHOAL_LOG_LEVEL sets for Shoal's log, which overrides the config's; None: not set.

    Raises: UsageError: there is no such level.
    """
    level = (os.environ if variables is None else variables).get(LOG_LEVEL, "").lower()
    if level and level not in LEVELS:
        raise UsageError(f"{LOG_LEVEL}={level!r} is not a level.", do=f"use one of {', '.join(LEVELS)}.")
    return level or None


def schedulers_elasticity() -> str | None:
    """The section ``elasticity`` that the job's scheduler has used, as JSON; None: the variable is not set."""
    # Here, since the command line reads the environment too, and would take twice as long with the config's schema.
    from shoal.config.elastic import SCHEDULERS_VARIABLE

    return os.environ.get(SCHEDULERS_VARIABLE)


def _num_threads(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text.split(",")[0]) or None  # it may be a list, one number per nested level
    except ValueError:
        raise UsageError(f"OMP_NUM_THREADS={text!r} is not a number.", where="the environment") from None
