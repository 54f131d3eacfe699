"""``autotuning.enabled``: the engine measures some steps, writes them and ends the process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks

ROWS, WIDTH = 4, 32


def train(engine: Any) -> None:
    for step in range(9):
        for _ in range(2):
            engine.backward(engine(torch.ones(ROWS, WIDTH)).square().mean())
            time.sleep(0.01 * step)
            engine.step()


def run(folder: Path, **section: Any) -> tuple[dict[str, float], list[int]]:
    """An experiment on two ranks, two micro-batches a step; each step takes 20 ms longer than the one before."""
    path = folder / "new" / "metrics.json"
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "autotuning": {"enabled": True, "metric_path": str(path), **section},
    }

    def job() -> int:
        engine: Any = shoal.initialize(model=nn.Linear(WIDTH, WIDTH, bias=False), config=config)[0]
        with torch.no_grad():
            engine(torch.ones(1, WIDTH))  # an evaluation is no part of a step
        with pytest.raises(SystemExit, match=r"^0$"):
            train(engine)
        steps: int = engine.global_steps
        engine.destroy()
        return steps

    steps = run_ranks(2, job)
    return json.loads(path.read_text()), steps


def test_the_median_of_the_steps_from_start_to_end_is_written_and_the_run_ends(tmp_path: Path) -> None:
    metrics, steps = run(tmp_path, start_profile_step=2, end_profile_step=4)
    assert steps == [5, 5]
    assert 60 <= metrics["latency"] < 300  # the steps take 40, 60 and 80 ms and what they compute
    assert metrics["throughput"] == pytest.approx(2 * 2 * ROWS / (metrics["latency"] / 1e3))
    flops = 3 * 2 * (2 * ROWS * WIDTH * WIDTH)  # forward and backward of two micro-batches
    assert metrics["FLOPS_per_gpu"] == pytest.approx(flops / (metrics["latency"] / 1e3), rel=0.05)


def test_a_first_step_that_is_measured_is_not_counted(tmp_path: Path) -> None:
    metrics, steps = run(tmp_path, start_profile_step=0, end_profile_step=0)
    assert steps == [1, 1] and set(metrics) == {"latency", "throughput"}
