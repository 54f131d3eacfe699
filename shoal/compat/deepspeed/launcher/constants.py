"""``deepspeed.launcher.constants``: the names of launchers of several machines."""

from __future__ import annotations

PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024

__all__ = [
    "IMPI_LAUNCHER",
    "MPICH_LAUNCHER",
    "MVAPICH_LAUNCHER",
    "OPENMPI_LAUNCHER",
    "PDSH_LAUNCHER",
    "PDSH_MAX_FAN_OUT",
    "SLURM_LAUNCHER",
]
