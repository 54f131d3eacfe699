"""The times of every rank by phase: measured in some steps, exchanged, and written by rank 0."""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.engine.parts.rank_times import SlowRanks
from shoal.observe.goodput import RankTimesRow


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


class Sleep(torch.autograd.Function):
    """Sleeps in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleepy(nn.Module):
    """A model of two units that are gathered; the first one's forward and backward take so many seconds more."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        time.sleep(self.seconds[0])
        return self.out(Sleep.apply(x, self.seconds[1]))


@pytest.mark.parametrize("phase", ["forward", "backward", "data"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_slow_rank_is_named_with_its_phase_and_what_the_others_wait(
    stage: int, phase: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def rank_main() -> None:
        seconds = dict.fromkeys(["forward", "backward", "data"], 0.005)
        if current_world().rank == 1:
            seconds[phase] = 0.08
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "goodput": {
                "file": str(tmp_path / "log"),
                "rank_times_every": 1,
                "slow_rank_factor": 2.0,
                "slow_rank_samples": 3,
            },
        }
        engine = shoal.initialize(model=Sleepy(seconds["forward"], seconds["backward"]), config=config)[0]
        for _ in range(4):
            time.sleep(seconds["data"])
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
        engine.destroy()

    with caplog.at_level(logging.WARNING, logger="shoal"):
        run_ranks(3, rank_main)
    (text,) = [record.getMessage() for record in caplog.records if "slow" in record.getMessage()]
    assert text.startswith("step ") and f": rank 1 on {socket.gethostname()} is slow, in 3 measured" in text
    assert f" in a row: {phase} takes " in text
    _, times = text.split(" takes ")
    took, usual, waited = [float(word) for word in times.split() if word.replace(".", "", 1).isdigit()][:3]
    assert took >= 80 > 40 > usual >= 5 and waited > 40


def test_a_rank_is_named_once_and_again_when_it_recovers() -> None:
    judge = SlowRanks(["a", "a", "b", "b"], factor=1.3, num_in_row=2).judge

    def step(backward: float) -> list[str]:
        own = {"forward": [10.0] * 4, "backward": [20.0, 20.0, 20.0, backward], "data": [1.0] * 4}
        return list(judge(RankTimesRow(1, {}, own)))

    assert step(35.0) == [] == step(20.0) == step(35.0)  # not in a row
    (text,) = step(35.0)
    assert text.startswith(
        "rank 3 on b is slow, in 2 measured steps in a row: backward takes 35.0 ms of a step, the median of the other"
        " ranks is 20.0 ms; they wait 15.0 ms of each step for it."
    )
    assert step(35.0) == [] == step(20.0) == step(35.0) == step(20.0)
    assert step(20.0) == ["rank 3 on b is no longer slow: its work takes 31.0 ms of a step, the median is 31.0 ms."]
    assert step(20.0) == []


def test_a_rank_below_the_factor_and_a_rank_alone_are_not_named() -> None:
    several, alone = SlowRanks(["a"] * 4, 1.3, 1), SlowRanks(["a"], 1.3, 1)
    for at in range(8):
        backward = [20.0 + 9.0 * (rank == at % 4) for rank in range(4)]  # 40 ms against 31 ms
        own = {"forward": [10.0] * 4, "backward": backward, "data": [1.0] * 4}
        assert not list(several.judge(RankTimesRow(at, {}, own)))
        assert not list(alone.judge(RankTimesRow(at, {}, {"forward": [10.0 * at], "backward": [20.0], "data": [1.0]})))


@pytest.mark.parametrize(
    ("victims", "who"),
    [
        ({3}, "rank 3 on b is slow, in 1 measured steps in a row: "),
        ({2, 3}, "pipeline stage 1 (rank 2 on b, rank 3 on b) is slow, in 1 measured steps in a row: "),
    ],
    ids=["rank", "stage"],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_of_a_pipeline_a_slow_rank_is_named_and_a_slow_stage(
    phase: str, victims: set[int], who: str, tmp_path: Path
) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seconds = dict.fromkeys(["forward", "backward"], 0.02)
            if current_world().rank in victims:
                seconds[phase] = 0.12
            time.sleep(seconds["forward"])
            outputs: torch.Tensor = Sleep.apply(super().forward(x), seconds["backward"])
            return outputs

    def rank_main() -> None:
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "parallel": {"pp": 2},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "goodput": {"file": str(tmp_path / "log"), "rank_times_every": 1, "slow_rank_factor": 2.0},
        }
        layers = [shoal.LayerSpec(Layer, 8, 8) for _ in range(2)]
        model = shoal.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine = shoal.initialize(model=model, config=config)[0]
        for _ in range(5):
            engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 2))
        engine.destroy()

    run_ranks(4, rank_main)
    found = rows(tmp_path / "log")
    assert len(found) == 5 and all(row["stages"] == [0, 0, 1, 1] for row in found)
    # The least of all steps: other programs make a rank slow as well.
    own = {
        each: [min(times) for times in zip(*(row["own"][each] for row in found), strict=True)]
        for each in ("forward", "backward", "data")
    }
    assert all(own[phase][rank] >= 240 for rank in victims)  # two micro-batches
    judge = SlowRanks(["a", "a", "b", "b"], factor=2.0, num_in_row=1).judge
    (text,) = judge(RankTimesRow(1, {}, own, found[0]["stages"]))
    assert text.startswith(f"{who}{phase} takes ")
