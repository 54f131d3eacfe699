"""``shoal train`` over parts of sequences that do not divide by the ranks: the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.job import TrainJob
from shoal.cli.training import train
from shoal.comm.threads import run_ranks
from shoal.data import load_tokenizer, split, tokenize
from tests.helpers.training import gpt_of_own_numbers


def losses(folder: Path, ranks: int, **degrees: int) -> dict[str, list[float]]:
    """What a run of three steps on sequences of 13 tokens logs."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(100)), encoding="utf-8")
    job = TrainJob(
        text=(str(text),), sequence=13, hidden=16, heads=2, layers=1, steps=3, ranks=ranks, micro_batch=2,
        accumulation=2, stage=2, precision="fp32", sample_tokens=0, save_every=0, out=str(folder / f"{degrees}"),
        **degrees,
    )  # fmt: skip
    run_ranks(ranks, train, job)
    found: dict[str, list[float]] = {}
    for line in (Path(str(job.out)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"sp": 2}], ids=str)
def test_unequal_parts_train_as_one_process(
    degrees: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.training.GPT", gpt_of_own_numbers)
    alone, spread = losses(tmp_path, 1), losses(tmp_path, 2, **degrees)
    for name in ("train/loss", "validation/loss", "train/gradient_norm"):
        assert spread[name] == pytest.approx(alone[name], rel=1e-6), name


@pytest.mark.parametrize("degrees", [{}, {"cp": 2}, {"pp": 2}], ids=str)
def test_a_step_at_an_epochs_end_has_as_many_tokens_as_others(degrees: dict[str, int], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(14)), encoding="utf-8")
    job = TrainJob(
        text=(str(text),), sequence=12, hidden=16, heads=2, layers=2, steps=6, ranks=2, micro_batch=4, accumulation=1,
        stage=1, precision="fp32", sample_tokens=0, save_every=0, out=str(tmp_path / "run"), **degrees,
    )  # fmt: skip
    run_ranks(2, train, job)
    tokenizer = load_tokenizer(None)
    training, _ = split(tokenize([text.read_text(encoding="utf-8")], tokenizer), 0.05, 12)
    global_batch = 4 if degrees else 8
    assert len(training) % global_batch and len(training) < 6 * global_batch
    expected = 6 * 12 * global_batch
    assert dict(json.loads((tmp_path / "run" / "run.json").read_text())["facts"])["tokens seen"] == str(expected)
