"""The only reader of environment variables: which rank this process is, and what its launcher wants.

    launcher          rank                  local rank             world size    master
    TorchElastic      RANK                  LOCAL_RANK             WORLD_SIZE    MASTER_ADDR, MASTER_PORT
    Slurm (srun)      SLURM_PROCID          SLURM_LOCALID          SLURM_NTASKS  first of SLURM_JOB_NODELIST
    Open MPI          OMPI_COMM_WORLD_RANK  ..._LOCAL_RANK         ..._SIZE      MASTER_ADDR
    MPICH, Intel MPI  PMI_RANK              MPI_LOCALRANKID        PMI_SIZE      MASTER_ADDR
    none              0                     0                      1             127.0.0.1

The first row whose variables are there wins, but for Slurm, which comes last: what srun has started may be TorchElastic
or MPI. ``LOCAL_RANK`` is asked of nobody: where the launcher does not say it, a single node is assumed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.errors import UsageError

Launcher = Literal["torchelastic", "slurm", "openmpi", "mpich", "none"]

_DEFAULT_PORT = 29500
_SLURM_PORTS = 20_000, 40_000  # a job's port is drawn from here by its number, so that jobs on one node differ


@dataclass(frozen=True)
class Environment:
    """What the launcher has said about this process.

    ``master_port`` is 0 where nobody has named one and there is one rank: any free port will do.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_address: str
    master_port: int
    num_threads: int | None  # OMP_NUM_THREADS
    visible_devices: tuple[str, ...] | None  # CUDA_VISIBLE_DEVICES; () hides all; None where unset

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, so that it must not start ranks itself."""
        return self.launcher != "none"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or the one given.

    Raises: UsageError: a variable that is not a number, or a rank outside of its world.
    """
    env = os.environ if variables is None else variables
    launcher = _launcher_of(env)
    rank_key, local_key, world_key, local_world_key = _KEYS[launcher]
    rank = _number(env, rank_key, 0)
    world_size = _number(env, world_key, 1)
    local_world_size = _number(env, local_world_key, 0)
    if not local_world_size:
        local_world_size = _slurm_tasks_here(env) if launcher == "slurm" else world_size
    local_rank = _number(env, local_key, rank % max(1, local_world_size))
    if not 0 <= rank < world_size:
        raise UsageError(
            f"{rank_key}={rank} and {world_key}={world_size}: no such rank.",
            where=f"the environment, as set by {launcher}",
            do="start every rank by the same launcher, or unset these variables for a run of one process.",
        )
    address, port = _master(env, launcher, world_size)
    devices = env.get("CUDA_VISIBLE_DEVICES")
    return Environment(
        launcher=launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_address=address,
        master_port=port,
        num_threads=_number(env, "OMP_NUM_THREADS", 0) or None,
        visible_devices=None if devices is None else tuple(name for name in devices.split(",") if name.strip()),
    )


def heap_is_set(variables: Mapping[str, str] | None = None) -> bool:
    """Has somebody said already how glibc's heap is to keep what is freed?

    >>> heap_is_set({"MALLOC_TRIM_THRESHOLD_": "0"}), heap_is_set({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"})
    (True, False)
    """
    env = os.environ if variables is None else variables
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
    return any(name in env for name in names) or "glibc.malloc." in env.get("GLIBC_TUNABLES", "")


_KEYS: dict[Launcher, tuple[str, str, str, str]] = {
    "torchelastic": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", ""),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "none": ("", "", "", ""),
}


def _launcher_of(env: Mapping[str, str]) -> Launcher:
    for launcher in ("torchelastic", "openmpi", "mpich"):
        rank_key, _, world_key, _ = _KEYS[launcher]
        if rank_key in env and world_key in env:
            return launcher
    # A shell inside an allocation has SLURM_PROCID too: only a step that srun started has a step's number.
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit():
        return "slurm"
    return "none"


def _number(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key, "").strip() if key else ""
    if not text:
        return default
    # OMP_NUM_THREADS may be a list, one number per nested level.
    if key == "OMP_NUM_THREADS":
        text = text.split(",")[0]
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{key}={text!r} is not a number.", where="the environment") from None


def _master(env: Mapping[str, str], launcher: Launcher, world_size: int) -> tuple[str, int]:
    address, port = env.get("MASTER_ADDR"), _number(env, "MASTER_PORT", 0)
    if launcher == "slurm":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        low, high = _SLURM_PORTS
        address = address or first_node(nodes)
        port = port or low + _number(env, "SLURM_JOB_ID", 0) % (high - low)
    return address or "127.0.0.1", port or (_DEFAULT_PORT if world_size > 1 else 0)


def first_node(node_list: str) -> str:
    """The first host of Slurm's compressed form.

    >>> first_node("gpu[003-007,009],login1"), first_node("n1,n2"), first_node("rack[2-3]n[04,05]")
    ('gpu003', 'n1', 'rack2n04')
    """
    depth, end = 0, len(node_list)
    for index, letter in enumerate(node_list):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = index
            break
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", node_list[:end])


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """This node's share of the tasks; SLURM_STEP_TASKS_PER_NODE looks like ``4(x2),3``: 4, 4 and 3."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1")
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a list of tasks per node.", where="the environment, as set by Slurm")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_number(env, "SLURM_NODEID", 0), len(counts) - 1)]
