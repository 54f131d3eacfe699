"""``shoal train`` on files of tokens, lines and blends: the samples and losses of a run without a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.cli.job import TrainJob
from shoal.cli.training import train
from shoal.comm.threads import run_ranks
from shoal.data import TokenFileWriter, TokenStream
from shoal.data.tokenizers import ByteTokenizer
from shoal.errors import UsageError
from shoal.models.gpt import GPT, GPTConfig

LENGTH = 12


def write_sources(folder: Path) -> dict[str, str]:
    """A source of each kind, by its name on the command line."""
    lines = [json.dumps({"text": f"{number} is followed by {number + 1}."}) for number in range(60)]
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with TokenFileWriter(folder / "tokens", tokenizer=ByteTokenizer()) as writer:
        for length in np.random.default_rng(0).integers(1, 90, 60):
            writer.write(np.arange(length) % 200 + 1)
    blend = [{"path": str(folder / "lines.jsonl"), "weight": 1}, {"path": str(folder / "tokens"), "weight": 3}]
    (folder / "blend.yaml").write_text(json.dumps(blend), encoding="utf-8")
    return {"tokens": "tokens", "lines": "lines.jsonl", "blend": "blend.yaml"}


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """The (source, sample) that training reads from now on; models have the same values on any ranks."""
    read: list[tuple[int, int]] = []
    get = TokenStream.__getitem__

    def recorded(stream: TokenStream, key: Any) -> Any:
        if stream.state()["shuffle"]:
            read.append(tuple(stream.keys(key)[0]) if isinstance(key, int) else tuple(key))  # type: ignore[arg-type]
        return get(stream, key)

    def gpt(shape: GPTConfig, **given: Any) -> GPT:
        model = GPT(shape, **given)
        generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
        for parameter in model.parameters():
            parameter.data.normal_(std=0.1, generator=generator)
        return model

    monkeypatch.setattr(TokenStream, "__getitem__", recorded)
    monkeypatch.setattr("shoal.cli.training.GPT", gpt)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache is there
    return read


def run(folder: Path, name: str, text: str, ranks: int, steps: int, resume: str | None = None) -> list[float]:
    """Train with global batches of 4. Returns: the losses by step."""
    job = TrainJob(
        text=(str(folder / text),), sequence=LENGTH, hidden=16, heads=2, layers=1, steps=steps, ranks=ranks,
        micro_batch=4 // ranks, accumulation=1, stage=1, precision="fp32", sample_tokens=0, schedule="constant",
        validate_every=100, out=str(folder / name), resume=None if resume is None else str(folder / resume),
    )  # fmt: skip
    run_ranks(ranks, train, job)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("source", ["tokens", "lines", "blend"])
def test_a_run_that_is_resumed_on_other_ranks_reads_and_learns_the_same(
    source: str, tmp_path: Path, samples: list[tuple[int, int]]
) -> None:
    text = write_sources(tmp_path)[source]
    losses = run(tmp_path, "whole", text, 1, 6)
    whole = samples[1:]  # without the sample that the model is shown
    samples.clear()
    before = run(tmp_path, "before", text, 1, 2)
    samples.clear()
    after = run(tmp_path, "after", text, 2, 6, resume="before")
    assert before == losses[:2]
    assert after == pytest.approx(losses[2:], rel=1e-6)
    first, *read = samples
    assert len(whole) == 24 and len(set(whole)) == 24
    shown = [first, read.pop(read.index(first))]  # each rank shows its model one
    assert shown == [first, first]
    assert sorted(read) == sorted(whole[8:])
    if source == "blend":
        assert [number for number, _ in whole].count(0) == 6  # a quarter


def test_steps_that_the_epochs_of_a_source_do_not_allow_are_refused(
    tmp_path: Path, samples: list[tuple[int, int]]
) -> None:
    write_sources(tmp_path)
    (tmp_path / "once.yaml").write_text(f"- {{path: {tmp_path}/lines.jsonl, epochs: 1}}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="100 steps read 400 sequences; the epochs of the sources allow"):
        run(tmp_path, "run", "once.yaml", 1, 100)
