"""``shoal deepspeed --elastic_training``: a machine is lost and comes back, a rank fails, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

END = 300

# Trains from the last checkpoint to step END. Each step's number, ranks, batch and mean loss go to a file; rank 0 may
# fail, once.
SCRIPT = """
import json, os, pathlib, sys, time
import deepspeed, torch

folder, end, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
config = {
    "elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1, 2], "version": 0.1},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "checkpoint": {"keep_last": 2},
}
data = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
engine, _, loader, _ = deepspeed.initialize(
    model=model, config=config, training_data=torch.utils.data.TensorDataset(data)
)
if (folder / "saved" / "latest").exists():
    engine.load_checkpoint(folder / "saved")
batches = iter(deepspeed.utils.RepeatingLoader(loader))
while engine.global_steps < end:
    step, total = engine.global_steps, 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        (rows,) = next(batches)
        loss = (engine(rows[:, :4])[:, 0] - rows[:, 4]).square().mean()
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / engine.gradient_accumulation_steps()
    sums = torch.tensor([total / engine.world_size])
    deepspeed.comm.all_reduce(sums)
    if engine.global_rank == 0:  # before the save: a step whose save is interrupted is taken and written again
        with open(folder / "steps", "a") as file:
            file.write(json.dumps([step, engine.world_size, engine.train_batch_size(), float(sums)]) + "\\n")
    if pause >= 0:
        engine.save_checkpoint(folder / "saved")
    if step == 2 and engine.global_rank == 0 and not (folder / "failed").exists() and len(sys.argv) > 4:
        (folder / "failed").touch()
        raise ValueError("once")
    time.sleep(max(pause, 0))
"""


def steps_of(folder: Path) -> list[list[float]]:
    file = folder / "steps"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(folder: Path, world: int, after: int = 0, seconds: float = 90.0) -> int:
    """Until three steps were done by so many ranks. Returns: how many steps there are."""
    deadline = time.monotonic() + seconds
    while True:
        found = steps_of(folder)
        if sum(size == world for _, size, *_ in found[after:]) >= 3:
            return len(found)
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def command(folder: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "shoal", "deepspeed", "--elastic_training", "--no_local_rank", *flags]
    return [*line, "train.py", str(folder)], environment


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happens to, on one rank."""
    folder = tmp_path_factory.mktemp("straight")
    line, environment = command(folder, "--num_gpus", "1")
    subprocess.run([*line, str(END), "-1"], cwd=folder, env=environment, check=True, timeout=100, capture_output=True)
    return [loss for *_, loss in steps_of(folder)]


@pytest.mark.timeout(300)
def test_a_machine_that_is_lost_and_comes_back_changes_no_loss(tmp_path: Path, straight: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--no_ssh", "--num_nodes", "2", "--num_gpus", "1", "--master_addr", "127.0.0.1"]
    flags += ["--master_port", str(port), "--min_elastic_nodes", "1"]
    started: list[subprocess.Popen[bytes]] = []

    def start(number: int) -> subprocess.Popen[bytes]:
        line, environment = command(tmp_path, *flags, "--node_rank", str(number))
        with (tmp_path / f"machine-{number}").open("ab") as said:
            process = subprocess.Popen(
                [*line, str(END), "0.3"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=said
            )
        started.append(process)
        return process

    try:
        first, second = start(0), start(1)
        count = wait_for(tmp_path, 2)
        second.send_signal(signal.SIGKILL)  # its ranks go with it
        count = wait_for(tmp_path, 1, count)
        third = start(1)
        wait_for(tmp_path, 2, count)
        assert first.poll() is None and third.poll() is None
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)
    found = steps_of(tmp_path)
    assert {batch for _, _, batch, _ in found} == {4}
    last = max(int(step) for step, *_ in found)
    assert sorted({int(step) for step, *_ in found}) == list(range(last + 1))
    for step, size, _, loss in found:
        assert loss == pytest.approx(straight[int(step)], rel=1e-5), (step, size)


@pytest.mark.timeout(200)
def test_ranks_of_one_machine_start_anew_when_one_fails(tmp_path: Path, straight: list[float]) -> None:
    line, environment = command(tmp_path, "--num_gpus", "2")
    done = subprocess.run(
        [*line, "6", "0", "fails"],
        cwd=tmp_path, env=environment, timeout=150, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shoal: all ranks are started anew: rank 0 failed: ValueError: once (at train.py:38, in" in done.stderr
    assert "so this rank stops too" not in done.stderr
    assert [step for step, *_ in steps_of(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert [loss for *_, loss in steps_of(tmp_path)] == pytest.approx(straight[:6], rel=1e-5)
