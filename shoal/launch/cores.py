"""Cores of this machine, divided among ranks: each rank's threads run on its own cores only.

CPUs 0 to 7, where 0 and 4 are threads of one core, 1 and 5 of the next ...; 2 ranks
rank 0    CPUs 0, 1, 4, 5    2 cores, so OMP_NUM_THREADS=2
rank 1    CPUs 2, 3, 6, 7
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cpu_list(text: str) -> list[int]:
    """CPUs by number, as Linux writes them. Raises: ConfigError: it is no such list.

    >>> cpu_list("0-2,8")
    [0, 1, 2, 8]
    """
    cpus: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or not (high if dash else low).isdigit():
            raise ConfigError(f"{text!r} is not a list of CPUs.", do="write it as 0-3,8-11.", code="launch-cores")
        cpus += range(int(low), int(high or low) + 1)
    return cpus


def physical_cores(wanted: Collection[int] | None = None, topology: str = _TOPOLOGY) -> list[list[int]]:
    """The CPUs of each core that this process may use, or of those of ``wanted``.

    Args:
        topology: the file that lists the CPUs of a CPU's core.

    Raises: ConfigError: CPUs that this process may not use, or a system that does not bind processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("this system does not bind processes to cores.", do="leave it out.", code="launch-cores")
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(wanted or ()) - allowed)
    if missing:
        raise ConfigError(
            f"CPUs {', '.join(map(str, missing))} do not exist, or this process may not use them.",
            do=f"name some of: {', '.join(map(str, sorted(allowed)))}.",
            code="launch-cores",
        )
    left = sorted(allowed if wanted is None else wanted)
    cores: list[list[int]] = []
    while left:
        path = Path(topology.format(left[0]))
        siblings = cpu_list(path.read_text(encoding="utf-8").strip()) if path.is_file() else [left[0]]
        cores.append([cpu for cpu in left if cpu in siblings or cpu == left[0]])
        left = [cpu for cpu in left if cpu not in cores[-1]]
    return cores


@dataclass(frozen=True)
class BoundCores:
    """The CPUs of each rank of this machine, and its number of threads: one for each core."""

    cpus: list[list[int]]
    num_threads: int


def divide_cores(cores: Sequence[Sequence[int]], num_ranks: int) -> BoundCores:
    """As many neighbouring cores for each rank; the cores that are over stay idle.

    Raises: ConfigError: fewer cores than ranks.

    >>> divide_cores([[0, 4], [1, 5], [2, 6], [3, 7], [8]], 2)
    BoundCores(cpus=[[0, 1, 4, 5], [2, 3, 6, 7]], num_threads=2)
    """
    each = len(cores) // num_ranks
    if not each:
        raise ConfigError(
            f"{num_ranks} ranks, each with cores of its own, and {len(cores)} cores.",
            do="start fewer ranks, or leave --bind_cores_to_rank out.",
            code="launch-cores",
        )
    shares = [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    return BoundCores([sorted(cpu for core in share for cpu in core) for share in shares], each)
