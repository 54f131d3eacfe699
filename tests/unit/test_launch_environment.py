"""What a process is told by its launcher."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.launch.environment import first_node, read_environment

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

# name, variables, (launcher, rank, local rank, world size, local world size, master address, master port)
CASES = [
    ("nothing", {}, ("none", 0, 0, 1, 1, "127.0.0.1", 0)),
    ("torchrun", TORCHELASTIC, ("torchelastic", 5, 1, 8, 4, "10.0.0.1", 1234)),
    (
        "torchrun without LOCAL_RANK",
        {"RANK": "1", "WORLD_SIZE": "2"},
        ("torchelastic", 1, 1, 2, 2, "127.0.0.1", 29500),
    ),
    ("one rank by hand", {"RANK": "0", "WORLD_SIZE": "1"}, ("torchelastic", 0, 0, 1, 1, "127.0.0.1", 0)),
    ("RANK alone says nothing", {"RANK": "3"}, ("none", 0, 0, 1, 1, "127.0.0.1", 0)),
    ("srun", SLURM, ("slurm", 5, 1, 8, 4, "gpu003", 20077)),
    ("srun, uneven nodes", {**SLURM, "SLURM_TASKS_PER_NODE": "5,3"}, ("slurm", 5, 1, 8, 3, "gpu003", 20077)),
    ("srun, named master", {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "9"}, ("slurm", 5, 1, 8, 4, "a", 9)),
    (
        "a shell inside an allocation is no rank",
        {**SLURM, "SLURM_STEP_ID": ""},
        ("none", 0, 0, 1, 1, "127.0.0.1", 0),
    ),
    (
        "an interactive step is no rank",
        {**SLURM, "SLURM_STEP_ID": "interactive"},
        ("none", 0, 0, 1, 1, "127.0.0.1", 0),
    ),
    ("torchrun started by srun", {**SLURM, **TORCHELASTIC}, ("torchelastic", 5, 1, 8, 4, "10.0.0.1", 1234)),
    ("mpirun", OPENMPI, ("openmpi", 3, 1, 4, 2, "127.0.0.1", 29500)),
    ("mpirun inside Slurm", {**SLURM, **OPENMPI}, ("openmpi", 3, 1, 4, 2, "127.0.0.1", 29500)),
    (
        "mpiexec of MPICH",
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "h"},
        ("mpich", 1, 1, 2, 2, "h", 29500),
    ),
    (
        "mpiexec of Intel MPI",
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("mpich", 3, 1, 4, 2, "127.0.0.1", 29500),
    ),
]


@pytest.mark.parametrize(("variables", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_launchers_variables_are_understood(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    env = read_environment(variables)
    assert (
        env.launcher,
        env.rank,
        env.local_rank,
        env.world_size,
        env.local_world_size,
        env.master_address,
        env.master_port,
    ) == expected
    assert env.is_launched is (expected[0] != "none")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", ()), ("0,1", ("0", "1")), ("3", ("3",)), ("GPU-8a1b,", ("GPU-8a1b",))],
)
def test_visible_devices_are_kept_as_named(value: str | None, expected: tuple[str, ...] | None) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert read_environment(variables).visible_devices == expected


@pytest.mark.parametrize(("value", "expected"), [("", None), ("4", 4), ("4,2", 4)])
def test_the_number_of_threads_is_the_outer_levels(value: str, expected: int | None) -> None:
    assert read_environment({"OMP_NUM_THREADS": value}).num_threads == expected


def test_a_rank_outside_of_its_world_is_refused_with_the_variables() -> None:
    with pytest.raises(UsageError, match="RANK=4 and WORLD_SIZE=4"):
        read_environment({"RANK": "4", "WORLD_SIZE": "4"})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="RANK='first'"):
        read_environment({"RANK": "first", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("node_list", "expected"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-007,009],login1", "gpu003"),
        ("gpu[9,11]", "gpu9"),
        ("rack[2-3]n[04,05]", "rack2n04"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_compressed_list(node_list: str, expected: str) -> None:
    assert first_node(node_list) == expected
