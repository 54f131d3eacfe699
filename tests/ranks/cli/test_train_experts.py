"""``shoal train --experts``: the losses of one expert-parallel rank, at any degree and stage, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.job import TrainJob
from shoal.cli.training import train
from shoal.comm.threads import run_ranks
from shoal.models.gpt import GPT, GPTConfig

Logged = dict[str, list[float]]


@pytest.fixture(autouse=True)
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpt(shape: GPTConfig, **given: Any) -> GPT:
        with torch.device("cpu"):  # ranks that are threads share torch's generator
            model = GPT(shape, **given)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.1, generator=generator)
        return model

    monkeypatch.setattr("shoal.cli.training.GPT", gpt)


def run(folder: Path, name: str, ranks: int, **options: Any) -> tuple[Logged, dict[str, Any]]:
    """What a run logs, and its record."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(100)), encoding="utf-8")
    given = {"ranks": ranks, "steps": 3, "stage": 3, "save_every": 0, "sample_tokens": 0, "micro_batch": 2, **options}
    job = TrainJob(
        text=(str(text),), sequence=12, hidden=16, heads=2, layers=2, experts=4, precision="fp32",
        out=str(folder / name), **given,
    )  # fmt: skip
    run_ranks(ranks, train, job)
    found: Logged = {}
    for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for key, value in json.loads(line).items():
            found.setdefault(key, []).append(value)
    return found, json.loads((folder / name / "run.json").read_text(encoding="utf-8"))


def assert_same(found: Logged, expected: Logged) -> None:
    for key in ("train/loss", "validation/loss", "train/gradient_norm"):
        assert found[key] == pytest.approx(expected[key], rel=2e-5), key


def test_losses_do_not_depend_on_the_expert_parallel_degree_or_the_stage(tmp_path: Path) -> None:
    expected, record = run(tmp_path, "ep1", 2, stage=0)
    assert record["title"] == (
        "GPT 2 layers of 16 with 4 experts, 2 per token (22.7 k parameters, 14.5 k active), ZeRO-0 on 2 ranks"
    )
    assert record["model"]["active_parameters"] < record["model"]["parameters"]
    for stage in (0, 3):
        found, record = run(tmp_path, f"ep2-{stage}", 2, ep=2, stage=stage)
        assert record["title"].endswith(f"ZeRO-{stage} on 2 ranks, ep 2")
        assert_same(found, expected)


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_losses_beside_another_axis_are_those_of_data_parallel_ranks_alone(axis: str, tmp_path: Path) -> None:
    given = {"micro_batch": 1, "accumulation": 2}
    expected, _ = run(tmp_path, "alone", 2, **given)
    found, _ = run(tmp_path, "both", 4, ep=2, **{axis: 2}, **given)
    assert_same(found, expected)


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_ranks_with_parts_of_a_sequence_may_hold_different_experts(axis: str, tmp_path: Path) -> None:
    expected, _ = run(tmp_path, "whole", 2, **{axis: 2})
    found, _ = run(tmp_path, "divided", 2, ep=2, **{axis: 2})
    assert_same(found, expected)


def test_a_run_goes_on_at_another_expert_parallel_degree_and_stage(tmp_path: Path) -> None:
    expected, _ = run(tmp_path, "whole", 2, steps=4, schedule="constant")
    run(tmp_path, "begun", 2, ep=2, steps=2, schedule="constant", save_every=2)
    resumed = {"steps": 4, "schedule": "constant", "stage": 1, "resume": str(tmp_path / "begun")}
    found, _ = run(tmp_path, "on", 2, **resumed)
    assert found["train/loss"] == pytest.approx(expected["train/loss"][2:], rel=2e-5)
    assert found["validation/loss"][-1] == pytest.approx(expected["validation/loss"][-1], rel=2e-5)
