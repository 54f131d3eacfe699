"""Random faults in real jobs: each ends with the bits of the run without faults, and leaves no process and no file.

    CHAOS_RUNS=500 CHAOS_SEED=1 make test-nightly

A job restarts from its last checkpoint after each fault. The seed of a run is in the test's name.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks.launch.test_launch import is_alive

RUNS = int(os.environ.get("CHAOS_RUNS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
STEPS = 8

ACTIONS = ("kill", "stop", "abort", "raise", "leave", "exit 1", "terminate", "slow", "not finite")
PLACES = ("before_forward", "before_backward", "before_step", "at_step", "after_step", "save", "load", "start")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 1}, "checkpoint": {"async_save": True}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}},
)

START = """
import sys
from shoal.launch import Elastic, LocalJob, run_local
job = LocalJob((sys.executable, *sys.argv[2:]), int(sys.argv[1]), elastic=Elastic(max_restarts=12), stop_seconds=2)
outcome = run_local(job)
print(outcome.report, file=sys.stderr)
sys.exit(outcome.exit_code)
"""

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from safetensors.torch import save_file
import shoal
from tests.helpers.models import SEQUENCE, VOCABULARY, Plain

folder, steps, layout, faults = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
rank = int(os.environ["RANK"])
with open(folder / "pids", "a") as file:
    file.write(f"{os.getpid()}\\n")


def happen(place, step):
    for number, fault in enumerate(faults):
        if (fault["rank"], fault["place"], fault["step"]) != (rank, place, step):
            continue
        try:
            (folder / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue  # it has happened
        match fault["action"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "abort":
                os.abort()
            case "leave":
                os._exit(0)
            case "exit 1":
                os._exit(1)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "slow":
                time.sleep(0.5)
            case "not finite":
                return float("nan")
            case _:
                raise RuntimeError(f"fault {number}")
    return 0.0


class Faults(shoal.Part):
    def prepare(self, engine):
        self.engine = engine
        engine.checkpointing.on_phase = self.on_phase

    def on_phase(self, phase):
        happen("save", self.engine.global_steps)

    def before_forward(self, args, kwargs):
        happen("before_forward", self.engine.global_steps)

    def before_step(self):
        happen("before_step", self.engine.global_steps)

    def at_step(self, was_applied):
        happen("at_step", self.engine.global_steps)

    def after_step(self):
        happen("after_step", self.engine.global_steps)


happen("start", 0)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "timeouts": {"init": 20, "data": 20, "step": 4, "checkpoint": 4},
    **layout,
}
torch.manual_seed(0)
tokens = torch.randint(VOCABULARY, (64, SEQUENCE), generator=torch.Generator().manual_seed(1))
engine, _, loader, _ = shoal.initialize(
    model=Plain(), config=config, training_data=torch.utils.data.TensorDataset(tokens, tokens), parts=[Faults()]
)
happen("load", 0)
saved = folder / "saved"
if saved.exists():
    engine.allows_missing = True
    try:
        engine.load_checkpoint(saved)
    except shoal.errors.CheckpointError as error:
        if error.code != "checkpoint-missing":
            raise
batches = iter(shoal.data.RepeatingLoader(loader))
while engine.global_steps < steps:
    before = engine.global_steps
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(*next(batches))
        engine.backward(loss + happen("before_backward", before))
        engine.step()
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(saved)
state = engine.module_state_dict()
if rank == 0:
    save_file({name: value.clone() for name, value in state.items()}, folder / "final.safetensors")
engine.destroy()
"""


def run(folder: Path, ranks: int, layout: dict[str, Any], faults: list[dict[str, Any]]) -> tuple[int, str]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    arguments = [str(ranks), str(script), str(folder), str(STEPS), json.dumps(layout), json.dumps(faults)]
    job = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        capture_output=True, text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip
    return job.returncode, job.stderr + job.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(SEED, SEED + RUNS))
def test_random_faults_change_no_bit(seed: int, tmp_path: Path) -> None:
    import torch

    random_ = random.Random(seed)
    ranks, layout = random_.choice([2, 2, 3]), random_.choice(LAYOUTS)
    faults = [
        {
            "rank": random_.randrange(ranks), "place": random_.choice(PLACES), "action": random_.choice(ACTIONS),
            "step": random_.randrange(STEPS),
        }
        for _ in range(random_.choice([1, 1, 2, 3]))
    ]  # fmt: skip
    for fault in faults:
        if fault["place"] in ("start", "load"):
            fault["step"] = 0
        if fault["place"] == "start" and fault["action"] == "stop":
            fault["place"] = "load"  # the config's time-outs apply from initialize on
    code, text = run(tmp_path / "faults", ranks, layout, faults)
    assert code == 0, f"seed {seed}, {ranks} ranks, {layout}, {faults}:\n{text}"
    reference, text = run(tmp_path / "none", ranks, layout, [])
    assert reference == 0, text
    found, expected = (load_file(tmp_path / name / "final.safetensors") for name in ("faults", "none"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], (seed, layout, faults)
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "faults" / "pids").read_text().split())
    left = [path.name for path in (tmp_path / "faults" / "tmp").iterdir() if not path.name.startswith("shoal-hang-")]
    assert left == []
