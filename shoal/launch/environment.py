"""The environment of a process that may start ranks: its threads, devices and heap settings.

Which rank a process is, ``shoal.comm.environment`` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.comm.environment import wants_tracebacks
from shoal.errors import UsageError

LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_LEVEL = "SHOAL_LOG_LEVEL"


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
