"""``shoal run --autotuning``: a script that was written for DeepSpeed, unchanged, on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)  # two processes, twice
SCRIPT = """
import argparse
import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--rows", type=int)
args = parser.parse_args()
data = torch.utils.data.TensorDataset(torch.ones(64, 8))
engine, _, loader, _ = deepspeed.initialize(args=args, model=torch.nn.Linear(8, 1), training_data=data)
assert engine.train_micro_batch_size_per_gpu() == args.rows
for (x,) in loader:
    engine.backward(engine(x).mean())
    engine.step()
print("trained", engine.global_steps, "steps")
"""


def test_a_script_is_measured_and_then_trains_with_the_best_configuration(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": [2],
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "autotuning": {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--rows"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["run", "--ranks", "2", "--autotuning", "run", "train.py", "--deepspeed_config", "ds.json"]
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] trained 16 steps" in done.stdout
    one = tmp_path / "autotuning_results" / "z1_gas1_tmbspg2"
    metrics = json.loads((one / "metrics.json").read_text())
    assert metrics["throughput"] == pytest.approx(4e3 / metrics["latency"])
    assert "training ends after 6 steps" in (one / "stderr.log").read_text()
    assert "trained" not in (one / "stdout.log").read_text()
