"""Worlds of one rank, dry runs, and how a process finds out which rank it is."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.comm.environment import Launch, first_node, read_launch
from shoal.comm.failure import ExceptHook
from shoal.comm.protocol import Communicator, Work
from shoal.comm.world import World, current_world, fake_world, init_distributed
from shoal.config import load
from shoal.errors import ConfigError, UsageError
from shoal.mesh import Mesh
from shoal.text import clip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_the_world_is_this_rank() -> None:
    world = current_world()
    assert (world.rank, world.size, world.backend) == (0, 1, "none")
    assert current_world() is world
    assert not dist.is_initialized()
    seen: list[World] = []
    thread = threading.Thread(target=lambda: seen.append(current_world()))
    thread.start()
    thread.join()
    assert seen == [world]


def test_one_rank_does_at_once_what_a_collective_means() -> None:
    comm = World(0, 1, 0, torch.device("cpu"), "none", None).communicator("dp", Mesh.of(1))
    assert isinstance(comm, Communicator)
    full = torch.tensor([1.0, 2.0, 3.0])
    work = comm.all_gather(full, label="own range")
    assert isinstance(work, Work)
    assert work.wait() is full
    gathered = torch.zeros(3)
    assert comm.all_gather(gathered, full, label="shard").wait().tolist() == [1.0, 2.0, 3.0]
    out = torch.ones(3, dtype=torch.bfloat16)
    assert comm.reduce_scatter(full, out, scale=2.0, accumulate=True, label="add").wait() is out
    assert out.tolist() == [3.0, 5.0, 7.0]
    assert comm.reduce_scatter(full, full, scale=0.5, label="in place").wait().tolist() == [0.5, 1.0, 1.5]
    assert comm.all_reduce(full, scale=2.0, label="all").wait().tolist() == [1.0, 2.0, 3.0]
    assert comm.broadcast(full, 0, label="copy").wait() is full
    assert comm.exchange(full, label="norm").wait().tolist() == [[1.0, 2.0, 3.0]]
    assert comm.gather_objects({"a": [1]}, label="names") == [{"a": [1]}]
    comm.barrier(label="start")
    comm.drain()


def test_one_rank_copies_nothing_that_is_there_already() -> None:
    comm = World(0, 1, 0, torch.device("cpu"), "none", None).communicator("dp", Mesh.of(1))
    full = torch.ones(3)
    version = full._version
    comm.all_gather(full, full[:], label="own range").wait()
    comm.all_reduce(full, label="all").wait()
    comm.reduce_scatter(full, full, label="in place").wait()
    assert full._version == version


@pytest.mark.parametrize("size", [8, 1024, 4096])
def test_a_dry_run_issues_every_collective_without_values(size: int) -> None:
    with fake_world(size, rank=size - 1) as world, FakeTensorMode():
        assert current_world() is world
        assert dist.get_world_size() == size
        assert dist.get_rank() == size - 1
        comm = world.communicator("dp", Mesh.of(size))
        full = comm.empty(4 * size, torch.bfloat16, world.device)
        shard = torch.empty(4)
        assert comm.all_gather(full, torch.empty(4, dtype=torch.bfloat16), label="gather").wait() is full
        assert comm.reduce_scatter(full, shard, scale=0.5, accumulate=True, label="reduce").wait() is shard
        assert comm.all_reduce(full, scale=0.5, label="all").wait() is full
        assert comm.exchange(torch.empty(3), label="norm").wait().shape == (size, 3)
        assert len(comm.gather_objects(None, label="names")) == size
        assert len(world.recorder.last) == 5
    assert not dist.is_initialized()


def test_a_dry_run_keeps_values_finite() -> None:
    with fake_world(4, rank=1) as world:
        comm = world.communicator("dp", Mesh.of(4))
        full = torch.arange(8.0)
        assert comm.reduce_scatter(full, torch.empty(2), scale=0.5, label="reduce").wait().tolist() == [1.0, 1.5]
        assert comm.all_gather(full, torch.tensor([20.0, 30.0]), label="gather").wait().tolist() == [
            0.0, 1.0, 20.0, 30.0, 4.0, 5.0, 6.0, 7.0,
        ]  # fmt: skip


def test_init_distributed_without_a_launcher_makes_a_group_of_one() -> None:
    world = init_distributed(verbose=False)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert current_world() is world
    assert init_distributed() is world
    hook = sys.excepthook
    world.close()
    assert not dist.is_initialized()
    assert current_world() is not world
    assert sys.excepthook is not hook


def test_a_group_that_the_user_made_is_used_and_not_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = init_distributed()
    assert world.size == 1
    world.close()
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert current_world().backend == "none"


def test_a_group_that_takes_the_place_of_the_one_made_here_is_not_destroyed_with_it() -> None:
    before = init_distributed(verbose=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = current_world()
    assert before.is_closed and world is not before
    assert dist.get_rank() == 0
    world.close()
    dist.destroy_process_group()


def test_a_process_that_ends_keeps_no_group_and_so_none_of_its_threads_alive() -> None:
    program = (
        "import weakref, torch.distributed as dist, shoal\n"
        "from shoal.comm.world import _process\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "shoal.init_distributed()\n"
        "group = weakref.ref(dist.group.WORLD)\n"
        "dist.destroy_process_group()\n"
        "_process.close()  # what runs at exit\n"
        "print('gone' if group() is None else 'held')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["gone"]), done.stderr


def test_bad_requests_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="forbids"):
        init_distributed(dist_init_required=False)
    with pytest.raises(ConfigError, match="rank=3 and world_size=2"):
        init_distributed(rank=3, world_size=2)
    with pytest.raises(UsageError, match="has no rank 4"), fake_world(4, rank=4):
        pass
    world = World(0, 1, 0, torch.device("cpu"), "none", None)
    world.close()
    with pytest.raises(UsageError, match="is closed"):
        world.communicator("dp", Mesh.of(1))


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"RANK": "3"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a shell in an allocation
        ({"RANK": "3", "WORLD_SIZE": "4"}, Launch(3, 4, None, None, None, "env")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Launch(3, 4, 1, "a", 5, "env"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            Launch(1, 2, 1, None, None, "mpi"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Launch(1, 2, 1, "127.0.0.1", None, "mpi"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "h"},
            Launch(3, 4, 1, "h", None, "mpi"),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"},
            Launch(3, 4, 3, "127.0.0.1", None, "mpi"),
        ),
        (
            {
                "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "node[03-07,9],other",
            },
            Launch(5, 8, 1, "node03", None, "slurm"),
        ),
        (  # srun --mpi=pmi2
            {
                "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[3-4]",
                "PMI_RANK": "5", "PMI_SIZE": "8",
            },
            Launch(5, 8, 1, "n3", None, "slurm"),
        ),
        (  # mpiexec of MPICH in an allocation: the daemons are a step of Slurm, and the job has another first machine
            {
                "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[4-5]",
                "SLURM_JOB_NODELIST": "n[3-5]",
                "PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
            },
            Launch(3, 6, 1, "n3", None, "mpi"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "a1,b[2-3]",
            },
            Launch(1, 2, 0, "a1", None, "mpi"),
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Launch(1, 2, 1, "127.0.0.1", None, "mpi"),
        ),
    ],
)  # fmt: skip
def test_the_launcher_is_read_from_the_environment(environment: dict[str, str], launch: Launch | None) -> None:
    assert read_launch(environment) == launch


def test_a_bad_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two', not a whole number"):
        read_launch({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        read_launch({"RANK": "2", "WORLD_SIZE": "2"})


def test_a_world_size_without_a_rank_is_an_error_and_no_run_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for start in (current_world, init_distributed):
        with pytest.raises(ConfigError, match="says WORLD_SIZE=2, and not which rank this process is"):
            start()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current_world().size == 1


def test_mpi_on_several_machines_without_an_address_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for join in (init_distributed, current_world):
        with pytest.raises(ConfigError, match="4 ranks on more than one machine"):
            join()


def test_the_excepthook_reports_calls_the_one_before_it_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *details: calls.append("before"))
    before = sys.excepthook
    hook = ExceptHook(calls.append)
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert calls == [error, "before"]
    hook.remove()
    assert sys.excepthook is before


@pytest.mark.parametrize("case", ["plain", "an inner cause", "asked for", "a hook of the user's", "a cause"])
def test_an_uncaught_error_of_shoals_shows_the_frames_of_the_script_alone(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "excepthook", (lambda *error: sys.__excepthook__(*error)) if "user" in case else sys.__excepthook__
    )
    if case == "asked for":
        monkeypatch.setenv("SHOAL_TRACEBACK", "1")
    reported: list[BaseException] = []
    hook = ExceptHook(reported.append)
    with pytest.raises(ConfigError) as caught:
        load({"train_micro_batch_size_per_gpu": 1, "tpye": 1})
    error = caught.value
    if "cause" in case:
        with pytest.raises(ConfigError) as caught_before:
            load({"tpye": 2})
        trace = caught_before.tb  # the first frame is this file's; without it, the cause is the package's own
        error.__cause__ = caught_before.value.with_traceback(trace.tb_next if "inner" in case else trace)
    sys.excepthook(type(error), error, error.__traceback__)
    assert reported == [error]
    hook.remove()
    shown = capsys.readouterr().err
    assert f"{Path(__file__).name}" in shown and "[config] tpye: no such key" in shown
    assert ("in load" in shown) is (case not in ("plain", "an inner cause"))


def test_of_a_long_traceback_the_end_is_kept() -> None:
    assert clip("short") == "short"
    assert clip("a" * 20_000 + "ValueError: why").endswith("ValueError: why")
    assert len(clip("a" * 20_000)) < 16_100


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
