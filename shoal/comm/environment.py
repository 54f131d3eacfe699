"""Rank, world size and local rank as a launcher sets them in the environment, read here and nowhere else in ``comm``.

launcher               rank                  world size             local rank
torchrun, shoal run    RANK                  WORLD_SIZE             LOCAL_RANK
Open MPI               OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE   OMPI_COMM_WORLD_LOCAL_RANK
MVAPICH2               MV2_COMM_WORLD_RANK   MV2_COMM_WORLD_SIZE    MV2_COMM_WORLD_LOCAL_RANK
MPICH, Intel MPI       PMI_RANK              PMI_SIZE               MPI_LOCALRANKID
Slurm (srun)           SLURM_PROCID          SLURM_STEP_NUM_TASKS   SLURM_LOCALID

The first line that applies counts. In an allocation of Slurm, MPI's launchers start their daemons by srun, so their
ranks have Slurm's variables of the daemon too.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import ConfigError, UsageError
from shoal.heartbeat import HeartbeatPlace

TRACEBACK = "SHOAL_TRACEBACK"
HEARTBEATS = "SHOAL_HEARTBEATS"
QUORUM_TOKEN = "SHOAL_QUORUM_TOKEN"
INIT_SECONDS = "SHOAL_INIT_SECONDS"
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Launch:
    """What a launcher set for this process.

    Args:
        local_rank: among the ranks of this machine; None: the launcher does not set it.
        address: host of the store; None: the launcher names none.
        port: of the store; None likewise.
    """

    rank: int
    world_size: int
    local_rank: int | None
    address: str | None
    port: int | None
    launcher: str


def heartbeat_place() -> HeartbeatPlace | None:
    """Where this process's launcher reads what it is doing; None: no launcher does."""
    folder, local_rank = os.environ.get(HEARTBEATS), os.environ.get("LOCAL_RANK", "")
    if not folder or not local_rank.isdecimal():
        return None
    return HeartbeatPlace(folder, int(local_rank), int(os.environ.get("RANK", local_rank)))


def init_seconds() -> float | None:
    """How long a rank may take from its start to ``initialize``; 0: no limit; None: not set.

    Raises: UsageError: SHOAL_INIT_SECONDS is no number, or below 0.
    """
    text = os.environ.get(INIT_SECONDS, "")
    with suppress(ValueError):
        if not text or float(text) >= 0:
            return float(text) if text else None
    raise UsageError(f"{INIT_SECONDS}={text!r} is not a number of seconds.", where="the environment")


def quorum_token() -> str:
    """What replicas and their server show each other; empty: not set."""
    return os.environ.get(QUORUM_TOKEN, "")


def chosen_interfaces() -> tuple[str, str]:
    """What GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say; empty: not set."""
    return os.environ.get(_GLOO_INTERFACE, ""), os.environ.get(_NCCL_INTERFACE, "")


def set_interface(name: str) -> None:
    """Set the variables that the user has not. Gloo and NCCL take an interface in no other way."""
    os.environ.setdefault(_GLOO_INTERFACE, name)
    os.environ.setdefault(_NCCL_INTERFACE, f"={name}")


def launcher_has_store() -> bool:
    """True if torchrun's process has the store, at the address that it sets, and not rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def warn_on_rank_0(text: str) -> None:
    """A UserWarning in one process of those that a launcher started, by its variables: no communication is needed."""
    if is_first_process():
        warnings.warn(text, stacklevel=3)


def is_first_process() -> bool:
    """True in one process of those that a launcher started, by its variables, and in one that none started."""
    launch = read_launch()
    return launch is None or launch.rank == 0


def read_launch(environment: Mapping[str, str] | None = None, *, mpi_and_slurm: bool = True) -> Launch | None:
    """The launcher's variables, or None if no launcher started this process.

    Slurm counts only inside a step with several tasks: a shell in an allocation has ``SLURM_PROCID`` too.

    Raises: ConfigError: a variable that is not a number, or a rank outside the world.
    """
    values = os.environ if environment is None else environment
    address = values.get("MASTER_ADDR")
    port = _optional_number(values, "MASTER_PORT")
    if "RANK" in values and "WORLD_SIZE" in values:
        rank = _number(values, "RANK")
        launch = Launch(
            rank, _number(values, "WORLD_SIZE"), _optional_number(values, "LOCAL_RANK"), address, port, "env"
        )
    elif mpi_and_slurm and (names := _mpi_names(values)) is not None:
        launch = _of_mpi(values, names, address, port)
    elif mpi_and_slurm and values.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        nodes = values.get("SLURM_STEP_NODELIST") or values.get("SLURM_JOB_NODELIST") or ""
        launch = Launch(
            _number(values, "SLURM_PROCID"),
            _number(values, "SLURM_STEP_NUM_TASKS"),
            _optional_number(values, "SLURM_LOCALID"),
            address or first_node(nodes) or None,
            port,
            "slurm",
        )
    else:
        return None
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(
            f"the environment says rank {launch.rank} of {launch.world_size}",
            where=f"launcher {launch.launcher!r}",
            do="start every rank with a rank from 0 to world size - 1.",
            code="launch-environment",
        )
    return launch


def check_alone() -> None:
    """Raises: ConfigError: WORLD_SIZE says that there are more ranks, and no variable says which one this is."""
    if (size := _optional_number(os.environ, "WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"the environment says WORLD_SIZE={size}, and not which rank this process is",
            do="set RANK too, or start the ranks with shoal run, torchrun or srun; unset WORLD_SIZE to run alone.",
            code="launch-environment",
        )


def wants_tracebacks(environment: Mapping[str, str] | None = None) -> bool:
    """True if SHOAL_TRACEBACK asks for the whole traceback of Shoal's own errors."""
    return (os.environ if environment is None else environment).get(TRACEBACK, "0") not in ("", "0")


# The variables of rank, world size, local rank and local world size.
_OPEN_MPI = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
_MVAPICH = "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
_PMI = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"


def _mpi_names(values: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """The variables of the MPI that started this process; None: none did.

    ``srun --mpi=pmi2`` sets PMI's as well, with Slurm's own numbers: there Slurm's say more.
    """
    for names in (_OPEN_MPI, _MVAPICH):
        if names[1] in values:
            return names
    size = values.get(_PMI[1], "1")
    return _PMI if size not in ("1", values.get("SLURM_STEP_NUM_TASKS")) else None


def _of_mpi(
    values: Mapping[str, str], names: tuple[str, str, str, str], address: str | None, port: int | None
) -> Launch:
    """MPI names no address. Where all ranks are on one machine, it is the loopback address; in an allocation of Slurm
    it is the first machine, on which MPI's launchers start rank 0."""
    rank, size, local_rank, local_size = names
    is_alone = values.get(local_size) == values[size]
    first = "127.0.0.1" if is_alone else first_node(values.get("SLURM_JOB_NODELIST", "")) or None
    return Launch(
        _number(values, rank),
        _number(values, size),
        _optional_number(values, local_rank),
        address or first,
        port,
        "mpi",
    )


def _optional_number(values: Mapping[str, str], name: str) -> int | None:
    return _number(values, name) if name in values else None


def _number(values: Mapping[str, str], name: str) -> int:
    text = values.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is {text!r}, not a whole number",
            do=f"set {name}, or start the ranks with torchrun, shoal run, mpirun or srun.",
            code="launch-environment",
        ) from None


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
