"""``shoal deepspeed`` with an srun that starts its tasks here; ranks bound to cores, also by ``shoal run``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SRUN = """#!PYTHON
import os, subprocess, sys
count = int(sys.argv[sys.argv.index("--ntasks") + 1])
command = sys.argv[sys.argv.index("--export=ALL") + 1:]
tasks = []
for rank in range(count):
    variables = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_ID": 0}
    variables["SLURM_STEP_NODELIST"] = "127.0.0.1"
    tasks.append(subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in variables.items()}}))
sys.exit(max(task.wait() for task in tasks))
"""
TRAIN = """
import json, os, sys
import deepspeed, torch
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 2), config=config)
engine.backward(engine(torch.ones(2, 4)).sum()); engine.step()
with open(f"{sys.argv[1]}/{engine.global_rank}.json", "w") as file:
    json.dump([engine.world_size, engine.local_rank, engine.module.weight.detach().tolist()], file)
"""
BOUND = """
import glob, json, os, sys
with open(f"{sys.argv[2]}/{os.environ['RANK']}.json", "w") as file:
    files = glob.glob(sys.argv[2] + "/*.deepspeed")
    json.dump([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], files], file)
"""


def launched(tmp_path: Path, script: str, *flags: str, **variables: str) -> list[list[object]]:
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "shoal", "deepspeed", *flags, str(tmp_path / "script.py"), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]


def test_ranks_that_srun_starts_train_together(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN.replace("PYTHON", sys.executable))
    (programs / "srun").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--launcher", "slurm", "--num_nodes", "2", "--num_gpus", "1", "--master_port", str(port)]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    first, second = launched(tmp_path, TRAIN, *flags, PATH=path, OMP_NUM_THREADS="1")
    assert (first[:2], second[:2]) == ([2, 0], [2, 1])
    assert first[2] == second[2]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes")
def test_each_rank_keeps_to_its_core_and_the_launchers_number_is_in_a_file_meanwhile(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    listed = ",".join(map(str, cpus))
    flags = ["--num_gpus", str(len(cpus)), "--bind_core_list", listed, "--save_pid"]
    found = launched(tmp_path, BOUND, *flags, CUDA_VISIBLE_DEVICES="", TMPDIR=str(tmp_path))
    assert [own for own, _, _ in found] == [[cpu] for cpu in cpus]
    assert {threads for _, threads, _ in found} == {"1"}
    assert all(len(files) == 1 for _, _, files in found)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*.deepspeed"))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes")
def test_shoal_run_binds_each_rank_to_its_core_and_says_so(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    (tmp_path / "script.py").write_text(BOUND)
    command = [sys.executable, "-m", "shoal", "run", "--bind-cores", "--ranks", str(len(cpus)), "script.py", "-", "."]
    taskset = ["taskset", "-c", ",".join(map(str, cpus))]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*taskset, *command], cwd=tmp_path, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    found = [json.loads(path.read_text())[:2] for path in sorted(tmp_path.glob("*.json"))]
    assert found == [[[cpu], "1"] for cpu in cpus]
    assert f"shoal: cores of rank 0: {cpus[0]}; 1: {cpus[1]}; OMP_NUM_THREADS 1" in done.stderr
