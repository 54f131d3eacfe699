"""The times of every rank by phase: measured in some steps, exchanged, and written by rank 0."""

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
from shoal.comm.world import current_world


class Slow(nn.Module):
    """A linear layer whose forward takes long on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if current_world().rank == 1:
            time.sleep(0.02)
        return self.out(self.layer(x))


def rows(path: Path) -> list[dict[str, Any]]:
    return [read for read in map(json.loads, path.read_text().splitlines()) if read["event"] == "ranks"]


@pytest.mark.parametrize("stage", [1, 3])
def test_one_step_in_so_many_is_measured_on_every_rank_and_nothing_of_it_is_logged(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rank_main() -> list[bool]:
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "goodput": {"file": str(tmp_path / "log"), "rank_times_every": 4},
        }
        engine = shoal.initialize(model=Slow(), config=config)[0]
        was_on = []
        for number in range(16):
            was_on.append(engine.timers.is_on)
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            if number == 12:  # of step 7, the first micro-batch
                time.sleep(0.05)
        engine.destroy()
        return was_on

    was_on = run_ranks(2, rank_main)
    assert was_on[0] == was_on[1] == [at // 2 + 1 in (3, 7) for at in range(16)]
    found = rows(tmp_path / "log")
    assert [row["step"] for row in found] == [3, 7]
    for row in found:
        waits = "gather" if stage == 3 else "reduce"
        assert {"forward", "backward", "reduce", "step", "data"} | {waits} <= set(row["ms"])
        assert all(len(ranks) == 2 for ranks in row["ms"].values())
        assert row["ms"]["forward"][1] >= 40  # two micro-batches of 20 ms
        waited = [sum(row["ms"].get(phase, [0, 0])[rank] for phase in ("gather", "reduce", "step")) for rank in (0, 1)]
        assert waited[0] > 15  # rank 0 waits for rank 1
    assert found[1]["ms"]["data"][0] >= 50 > found[0]["ms"]["data"][0]
    assert not [record for record in caplog.records if record.getMessage().startswith("step ")]
