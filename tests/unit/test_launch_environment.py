"""The variables that a launcher sets for a process."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.launch.environment import read_environment

TORCHELASTIC = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}

CASES: list[tuple[str, dict[str, str], str]] = [
    ("nothing", {}, "none"),
    ("torchrun", TORCHELASTIC, "torchelastic"),
    ("torchrun without LOCAL_RANK", {"RANK": "1", "WORLD_SIZE": "2"}, "torchelastic"),
    ("one rank by hand", {"RANK": "0", "WORLD_SIZE": "1"}, "torchelastic"),
    ("RANK alone says nothing", {"RANK": "3"}, "none"),
    ("srun", SLURM, "slurm"),
    ("srun, uneven nodes", {**SLURM, "SLURM_TASKS_PER_NODE": "5,3"}, "slurm"),
    ("srun, named master", {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "9"}, "slurm"),
    ("a shell inside an allocation is no rank", {**SLURM, "SLURM_STEP_ID": ""}, "none"),
    ("an interactive step is no rank", {**SLURM, "SLURM_STEP_ID": "interactive"}, "none"),
    ("torchrun started by srun", {**SLURM, **TORCHELASTIC}, "torchelastic"),
    ("mpirun", OPENMPI, "openmpi"),
    ("mpirun inside Slurm", {**SLURM, **OPENMPI}, "openmpi"),
    ("mpiexec of MPICH", {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "h"}, "mpich"),
    (
        "mpiexec of Intel MPI",
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        "mpich",
    ),
]


@pytest.mark.parametrize(("variables", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_launchers_variables_are_understood(variables: dict[str, str], expected: str) -> None:
    env = read_environment(variables)
    assert env.launcher == expected
    assert env.is_launched is (expected != "none")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", ()), ("0,1", ("0", "1")), ("3", ("3",)), ("GPU-8a1b,", ("GPU-8a1b",))],
)
def test_visible_devices_keep_their_names(value: str | None, expected: tuple[str, ...] | None) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert read_environment(variables).visible_devices == expected


@pytest.mark.parametrize(("value", "expected"), [("", None), ("4", 4), ("4,2", 4)])
def test_the_number_of_threads_is_that_of_the_first_nested_level(value: str, expected: int | None) -> None:
    assert read_environment({"OMP_NUM_THREADS": value}).num_threads == expected


def test_a_number_of_threads_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="OMP_NUM_THREADS='many'"):
        read_environment({"OMP_NUM_THREADS": "many"})


def test_which_rank_it_is_is_not_asked_here() -> None:
    assert read_environment({"RANK": "first", "WORLD_SIZE": "4"}).is_launched
