"""``shoal verify --against one-process`` and ``shoal tune`` on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)  # each starts four processes, one after the other


def shoal_verify(folder: Path, config: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    file = folder / "config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **config}))
    command = [
        sys.executable,
        "-m",
        "shoal",
        "verify",
        str(file),
        "--ranks",
        "2",
        "--sequence",
        "16",
        "--against",
        "one-process",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=120)


def test_a_configuration_that_rounds_more_than_one_process_ends_with_1_and_the_place(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "wire": {"gather": "int8"}}
    done = shoal_verify(tmp_path, config, "--model", "nano", "--steps", "1")
    assert done.returncode == 1, done.stderr
    assert "The runs part at step 1, micro-batch 0: output of embedding" in done.stdout
    assert "run: 1 step on 2 ranks" in done.stderr


def test_a_model_and_batches_of_the_users_own_agree_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.drop = torch.nn.Dropout(0.5)\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 70), torch.nn.Linear(70, 1))\n"
        "    def forward(self, x):\n"
        "        return self.layers(self.drop(x)).square().mean()\n"
        "def batch(rows):\n"
        "    return (torch.randn(rows, 8),)\n"
    )
    words = ("--model", "mine:Model", "--batch", "mine:batch", "--json")
    done = shoal_verify(tmp_path, {"zero_optimization": {"stage": 2}}, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"is_equal": True, "first": None, "missing": []}


def test_a_run_that_fails_is_an_error_with_its_cause(tmp_path: Path) -> None:
    done = shoal_verify(tmp_path, {"parallel": {"tp": 2}}, "--model", "missing:Model")
    assert done.returncode == 2
    assert "[verify-run]" in done.stderr and "missing" in done.stderr


def test_the_fastest_of_two_plans_is_found_by_running_them(tmp_path: Path) -> None:
    words = ["tune", "nano", "--ranks", "2", "--machine", "h100", "--sequence", "16", "--global-batch", "8"]
    space = ["stage=1", "tp=1", "pp=1", "shards=all", "micro=2,4"]
    words += [
        *(word for each in space for word in ("--space", each)),
        "--trials",
        "2",
        "--steps",
        "2",
        "--out",
        "tuned",
    ]
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "tuned").glob("*/result.json"))]
    assert len(results) == 2 and all(0 < result["seconds"] < 60 and result["peak"] > 1e6 for result in results)
    chosen = json.loads((tmp_path / "tuned" / "config.json").read_text())
    fastest = min(results, key=lambda result: result["seconds"])
    (folder,) = [
        path.parent for path in (tmp_path / "tuned").glob("*/result.json") if json.loads(path.read_text()) == fastest
    ]
    assert chosen == json.loads((folder / "job.json").read_text())["config"]
