"""``shoal train`` on files of tokens, lines and blends: the samples and losses of a run without a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.job import TrainJob
from shoal.cli.training import train
from shoal.comm.threads import run_ranks
from shoal.data import TokenFileWriter, TokenStream
from shoal.data.tokenizers import ByteTokenizer
from shoal.errors import UsageError
from tests.helpers.training import gpt_of_own_numbers

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

    monkeypatch.setattr(TokenStream, "__getitem__", recorded)
    monkeypatch.setattr("shoal.cli.training.GPT", gpt_of_own_numbers)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache is there
    return read


def run(
    folder: Path, name: str, text: str, ranks: int, steps: int, resume: str | None = None, **more: Any
) -> list[float]:
    """Train with global batches of 4. Returns: the losses by step."""
    spread = math.prod(more.get(axis, 1) for axis in ("cp", "sp", "pp"))
    options: dict[str, Any] = {"sequence": LENGTH, "hidden": 16, "heads": 2, "layers": 1, "validate_every": 100, **more}
    job = TrainJob(
        text=(str(folder / text),), steps=steps, ranks=ranks, micro_batch=4 * spread // ranks, accumulation=1, stage=1,
        precision="fp32", sample_tokens=0, schedule="constant", out=str(folder / name),
        resume=None if resume is None else str(folder / resume), **options,
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


@pytest.mark.usefixtures("samples")
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("degrees", [{"cp": 2}, {"sp": 2}, {}], ids=str)
def test_documents_are_masked_on_any_ranks_unless_the_user_says_otherwise(
    degrees: dict[str, int], masks: bool, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    more: dict[str, Any] = {} if masks else {"reset_attention_mask": False}
    alone = run(tmp_path, "alone", "lines.jsonl", 1, 3, **more)
    assert run(tmp_path, "spread", "lines.jsonl", 2, 3, **degrees, **more) == pytest.approx(alone, rel=1e-6)
    others = run(tmp_path, "others", "lines.jsonl", 1, 3, reset_attention_mask=not masks)
    assert all(abs(one - other) > 1e-4 for one, other in zip(alone, others, strict=True))


@pytest.mark.usefixtures("samples")
def test_pipeline_stages_that_read_no_tokens_train_on_documents(tmp_path: Path) -> None:
    write_sources(tmp_path)
    first, *_, last = run(tmp_path, "run", "blend.yaml", 3, 30, pp=3, layers=3, learning_rate=0.01)
    assert last < 0.9 * first


def test_plain_text_has_no_documents_to_mask(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text. " * 50, encoding="utf-8")
    with pytest.raises(UsageError, match="plain text is one run of tokens"):
        run(tmp_path, "run", "text.txt", 1, 1, reset_attention_mask=True)


def test_steps_that_the_epochs_of_a_source_do_not_allow_are_refused(
    tmp_path: Path, samples: list[tuple[int, int]]
) -> None:
    write_sources(tmp_path)
    (tmp_path / "once.yaml").write_text(f"- {{path: {tmp_path}/lines.jsonl, epochs: 1}}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="100 steps read 400 sequences; the epochs of the sources allow"):
        run(tmp_path, "run", "once.yaml", 1, 100)
