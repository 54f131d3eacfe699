"""Ranks that MPI and Slurm start for real, Slurm's jobs by ``shoal run --slurm``, and ``shoal run`` on two machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import slurm as slurms
from tests.helpers.slurm import wait_for

TRAIN = """
import json, os, sys
import torch, shoal
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
engine.backward(engine(torch.full((2, 4), float(engine.global_rank + 1))).sum()); engine.step()
with open(f"{sys.argv[1]}/{engine.global_rank}.json", "w") as file:
    json.dump([engine.world_size, engine.local_rank, engine.module.weight.detach().tolist()], file)
"""
# Trains until the file "end" is there; fails on the node that BAD names.
LONG = """
import os, sys, time
import torch, shoal
task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
config = {"train_micro_batch_size_per_gpu": 2, "checkpoint": {"save_on_signal": True}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, *_ = shoal.initialize(model=torch.nn.Linear(4, 2), config=config)
if os.path.exists(f"saved{task}/latest"):
    engine.load_checkpoint(f"saved{task}")
else:
    engine.save_checkpoint(f"saved{task}")
where = f"{engine.global_rank} of {engine.world_size} on {os.environ['SLURMD_NODENAME']}"
print("begins at", engine.global_steps, "rank", where, sys.argv[1:], flush=True)
if os.environ["SLURMD_NODENAME"] == os.environ.get("BAD"):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while True:
    engine.backward(engine(torch.ones(2, 4)).sum()); engine.step()
    is_over = torch.tensor(float(os.path.exists("end")))
    if engine.world_size > 1:
        torch.distributed.broadcast(is_over, 0)
    if is_over:
        break
    time.sleep(0.1)
print("ends", where, flush=True)
"""
HANG = """
import sys, time
import torch, shoal
config = {"train_micro_batch_size_per_gpu": 1, "timeouts": {"step": 1.5}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}

class Model(torch.nn.Linear):
    def forward(self, x):
        if engine.global_rank == 1:
            time.sleep(600)
        return super().forward(x)

engine, *_ = shoal.initialize(model=Model(4, 2), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def cpu_only(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


def trained(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if why := slurms.missing():
        pytest.skip(why)
    with slurms.slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment | cpu_only(SLURM_CONF=environment["SLURM_CONF"])


_MPI = pytest.mark.parametrize(
    "command",
    [
        ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-x", "MASTER_PORT"),
        ("mpiexec.hydra",),
    ],
    ids=["Open MPI", "MPICH"],
)


@pytest.mark.timeout(120)
@_MPI
def test_mpi_starts_ranks_that_find_each_other(command: tuple[str, ...], script: str, tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    words = [*command, "-n", "2", sys.executable, script, str(tmp_path)]
    subprocess.run(words, env=cpu_only(MASTER_PORT=str(free_port())), check=True, timeout=110, capture_output=True)
    first, second = trained(tmp_path)
    assert (first[:2], second[:2]) == ([2, 0], [2, 1])
    assert first[2] == second[2]


@pytest.mark.timeout(120)
def test_shoal_run_on_two_machines_is_one_job(script: str, tmp_path: Path) -> None:
    place = ["--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "shoal", "run", *place]
    machines = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), "--ranks", str(1 + rank), script, str(tmp_path)], env=cpu_only()
        )
        for rank in (0, 1)
    ]
    assert [machine.wait(110) for machine in machines] == [0, 0]
    results = trained(tmp_path)
    assert [each[:2] for each in results] == [[3, 0], [3, 0], [3, 1]]
    assert results[0][2] == results[1][2] == results[2][2]


@pytest.mark.timeout(180)
def test_srun_starts_ranks_that_find_each_other(slurm: dict[str, str], script: str, tmp_path: Path) -> None:
    # The nodes' names are no host names of this machine.
    environment = slurm | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["srun", "--nodes", "2", "--ntasks", "4", sys.executable, script, str(tmp_path)]
    subprocess.run(words, env=environment, check=True, timeout=110, capture_output=True)
    results = trained(tmp_path)
    assert [each[:2] for each in results] == [[4, 0], [4, 1], [4, 0], [4, 1]]
    assert all(each[2] == results[0][2] for each in results)


def check_hang(command: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    """A rank that sleeps is named with its stack, and the launcher ends with the ranks' exit code, soon."""
    (folder / "hang.py").write_text(HANG)
    words = [*command, "-n", "2", sys.executable, str(folder / "hang.py")]
    job = subprocess.run(
        words, env=environment | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=110, check=False
    )
    said = job.stdout + job.stderr
    assert job.returncode == 134, said
    assert said.count("[hang]") == 1 and "[hang] step 0: rank 1 hangs; section 'step' of rank" in said, said
    assert re.search(r"rank 1: runs .*hang\.py:\d+, in forward; ", said), said
    assert re.search(r"rank 0: waits in a collective, called at .*hang\.py:\d+, in ", said), said


@pytest.mark.timeout(120)
@_MPI
def test_a_hang_under_mpi_is_explained_and_ends(command: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    check_hang(command, cpu_only(MASTER_PORT=str(free_port())), tmp_path)


@pytest.mark.timeout(180)
def test_a_hang_under_srun_on_two_nodes_is_explained_and_ends(slurm: dict[str, str], tmp_path: Path) -> None:
    check_hang(
        ("srun", "--nodes", "2"), slurm | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, tmp_path
    )


class SlurmJob:
    """A job that ``shoal run --slurm`` has submitted from a folder."""

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        self._folder, self._environment = folder, environment
        (folder / "long.py").write_text(LONG)
        words = ["--master-addr", "127.0.0.1", "--gpus", "0", "--stop-seconds", "40", *options, "long.py", "a b", "$X"]
        said = self.run(sys.executable, "-m", "shoal", "run", "--slurm", *words)
        assert said.startswith("wrote long.sbatch\nSubmitted batch job ")
        self.number = said.split()[-1]

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, env=self._environment, cwd=self._folder, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("long-*.out")))

    def wait_for(self, text: str, times: int) -> None:
        wait_for(lambda: self.output.count(text) >= times, f"{times} {text!r} in: {self.output}")

    def end(self) -> None:
        (self._folder / "end").touch()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cause", ["time limit", "preemption"])
def test_a_job_saves_before_it_is_stopped_and_goes_on_when_it_is_started_again(
    cause: str, slurm: dict[str, str], tmp_path: Path
) -> None:
    job = SlurmJob(tmp_path, slurm, "--nodes", "2", "--ranks", "1")
    job.wait_for("begins at 0 rank", 2)
    assert "rank 0 of 2 on n1 ['a b', '$X']" in job.output and "rank 1 of 2 on n2 ['a b', '$X']" in job.output
    if cause == "time limit":
        job.run("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1 of the script
    else:
        job.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    job.wait_for("the job is queued again", 1)
    assert "is saved in saved" in job.output
    job.wait_for("begins at", 4)
    assert job.output.count("begins at 0") == 2
    job.end()
    job.wait_for("ends", 2)
    wait_for(lambda: "JobState=COMPLETED" in job.run("scontrol", "show", "job", job.number), "the job has not ended")


@pytest.mark.timeout(240)
def test_an_array_leaves_out_a_node_with_a_hardware_error_and_drains_it(slurm: dict[str, str], tmp_path: Path) -> None:
    drain = ["--on-hardware-error", "drain"]
    job = SlurmJob(tmp_path, slurm, "--ranks", "1", "--array", "0-1", "--env", "BAD=n1", *drain)
    job.wait_for("begins at 0 rank 0 of 1 on n2", 2)
    node = job.run("scontrol", "show", "node", "n1")
    job.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert "+DRAIN " in node and "Reason=hardware error in job " in node
    assert job.output.count("hardware error: n1 is drained") == 2
    job.end()
    job.wait_for("ends", 2)
    failed = [
        (tmp_path / f"long.failed-nodes.{task}").read_text() for task in (0, 1) if (tmp_path / f"saved{task}").is_dir()
    ]
    assert failed == ["n1\n", "n1\n"]
    assert job.output.count("submitted anew without n1") == 2
