"""Cores of this machine, divided among ranks: each rank's threads run on its own cores only.

CPUs 0 to 7, where 0 and 4 are threads of one core, 1 and 5 of the next ...; 2 ranks
rank 0    CPUs 0, 1, 4, 5    2 cores, so OMP_NUM_THREADS=2
rank 1    CPUs 2, 3, 6, 7

With GPUs a rank's cores are those of its GPU's NUMA node, which ranks of one node share evenly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

_SYS = Path("/sys")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
# In a process of its own, since the launcher is to hold no context of a device.
_ADDRESSES = "from shoal.device import pci_addresses; print(*pci_addresses())"


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
            do="start fewer ranks, or do not bind them to cores.",
            code="launch-cores",
        )
    shares = [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    return BoundCores([sorted(cpu for core in share for cpu in core) for share in shares], each)


def cores_near(devices: Sequence[str], num_ranks: int, root: Path = _SYS) -> BoundCores:
    """Cores for each rank of those of its GPU's NUMA node, divided evenly among the ranks of that node.

    Where some GPU's node has no core that this process may use, the kernel knows no nodes of GPUs, or ranks have none,
    all cores are divided, in the order of their nodes. Ranks have the same number of threads: that of the one with the
    fewest cores.

    Args:
        devices: the PCI addresses of the GPUs, such as ``0000:3b:00.0``; rank ``r`` uses the ``r``-th.
        root: of the kernel's files.

    Raises: ConfigError: fewer cores than ranks, in all or at a node.
    """
    cores = physical_cores(topology=f"{root}/devices/system/cpu/cpu{{}}/topology/thread_siblings_list")
    nodes = [_cpus_in(path) for path in sorted(root.glob("devices/system/node/node*/cpulist"), key=_number_of_node)]
    near = [_cpus_in(root / "bus/pci/devices" / device / "local_cpulist") for device in devices[:num_ranks]]
    shared: dict[frozenset[int], list[int]] = {}  # ranks by the CPUs near their device
    for rank, cpus in enumerate(near):
        shared.setdefault(cpus, []).append(rank)
    parts = [[core for core in cores if cpus.issuperset(core)] for cpus in shared]
    is_apart = sum(map(len, parts)) == len({core[0] for part in parts for core in part})
    if len(near) < num_ranks or cores in parts or not all(parts) or not is_apart:
        order = {cpu: number for number, node in enumerate(nodes) for cpu in node}
        return divide_cores(sorted(cores, key=lambda core: (order.get(core[0], len(nodes)), core)), num_ranks)
    bound: dict[int, list[int]] = {}
    threads = []
    for part, ranks in zip(parts, shared.values(), strict=True):
        share = divide_cores(part, len(ranks))
        bound |= zip(ranks, share.cpus, strict=True)
        threads.append(share.num_threads)
    return BoundCores([bound[rank] for rank in range(num_ranks)], min(threads))


def pci_addresses() -> list[str]:
    """Of the GPUs that ranks of this machine see, in their order; none without GPUs."""
    done = subprocess.run([sys.executable, "-c", _ADDRESSES], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def describe_cores(bound: BoundCores, devices: Sequence[str]) -> str:
    """A line on the cores of each rank.

    >>> describe_cores(BoundCores([[0, 1, 2, 8], [3, 5]], 2), ["0000:3b:00.0"])
    'shoal: cores of rank 0: 0-2,8 (GPU 0000:3b:00.0); 1: 3,5; OMP_NUM_THREADS 2'
    """
    each = [
        f"{rank}: {_ranges(cpus)}" + (f" (GPU {devices[rank]})" if rank < len(devices) else "")
        for rank, cpus in enumerate(bound.cpus)
    ]
    return f"shoal: cores of rank {'; '.join(each)}; OMP_NUM_THREADS {bound.num_threads}"


def _ranges(cpus: Sequence[int]) -> str:
    begins = [cpu for cpu in cpus if cpu - 1 not in cpus]
    ends = [cpu for cpu in cpus if cpu + 1 not in cpus]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def _cpus_in(path: Path) -> frozenset[int]:
    """Of a file of the kernel; none where it is not there, or empty."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return frozenset(cpu_list(text)) if text else frozenset()


def _number_of_node(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))
