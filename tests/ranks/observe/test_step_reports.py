"""What rank 0 logs and writes after a step: times by phase, memory, and events by samples."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks

MICRO, ACCUMULATED, STEPS = 2, 2, 3


def train(tmp_path: Path, num_ranks: int = 1, **settings: Any) -> list[Any]:
    def rank_main() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": ACCUMULATED,
            "optimizer": {"type": "AdamW"},
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
            **settings,
        }
        engine = shoal.initialize(model=model, config=config)[0]
        for _ in range(STEPS * ACCUMULATED):
            engine.backward(engine(torch.ones(MICRO, 8)).sum())
            engine.step()
        last = dict(engine.timers.last_step)
        engine.destroy()
        return last

    return run_ranks(num_ranks, rank_main)


def series(tmp_path: Path, name: str) -> list[tuple[int, float]]:
    with (tmp_path / "job" / f"Train_Samples_{name}.csv").open() as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


@pytest.mark.parametrize("stage", [1, 3])
def test_times_are_logged_and_written_after_each_step(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    last = train(tmp_path, 2, wall_clock_breakdown=True, zero_optimization={"stage": stage})
    found = lines(caplog, "step ")
    number = r"\d+\.\d ms"
    assert len(found) == STEPS
    for step, line in enumerate(found, 1):
        assert re.fullmatch(
            rf"step {step}, forward {number}, backward {number} \(with reduce {number}\), step {number}", line
        )
    values = {
        name: series(tmp_path, f"elapsed_time_ms_{name}")
        for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    }
    samples = [2 * MICRO * ACCUMULATED * step for step in range(1, STEPS + 1)]
    assert all([at for at, _ in each] == samples for each in values.values())
    assert all(value > 0 for name in ("forward", "backward", "backward_allreduce", "step") for _, value in values[name])
    for (_, whole), (_, inner), (_, reduce) in zip(
        values["backward"], values["backward_inner"], values["backward_allreduce"], strict=True
    ):
        assert whole == pytest.approx(inner + reduce)
    assert values["forward"][-1][1] == pytest.approx(last[0]["forward"])


def test_with_steps_per_print_the_lines_means_are_those_of_the_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, wall_clock_breakdown=True, steps_per_print=3)
    (line,) = lines(caplog, "step ")
    assert line.startswith("step 3, loss ")
    for name in ("forward", "step"):
        mean = sum(value for _, value in series(tmp_path, f"elapsed_time_ms_{name}")) / STEPS
        assert f"{name} {mean:.1f} ms" in line


def test_memory_is_logged_after_each_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, memory_breakdown=True)
    size = r"[\d.]+ [KMG]iB"
    found = lines(caplog, "step ")
    assert len(found) == STEPS
    assert re.fullmatch(rf"step 1, memory after forward {size}, backward {size}, step {size}, peak {size}", found[0])


def test_recomputed_segments_are_timed_without_steps_per_print(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, activation_checkpointing={"profile": True, "modules": ["ReLU"]})
    tables = lines(caplog, "recomputed segments")
    assert len(tables) == STEPS
    assert re.search(rf"^ +1 +{ACCUMULATED} ", tables[0], re.MULTILINE)  # the segment's name, and its calls


def test_without_any_of_these_keys_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path)
    assert lines(caplog, "step ") == []
    assert not list(tmp_path.glob("job/*elapsed*"))


def test_events_are_at_the_samples_that_the_steps_have_ended_with(tmp_path: Path) -> None:
    train(tmp_path, 2)
    samples = [2 * MICRO * ACCUMULATED * step for step in range(1, STEPS + 1)]
    assert [at for at, _ in series(tmp_path, "lr")] == samples
    assert [at for at, _ in series(tmp_path, "train_loss")] == samples
