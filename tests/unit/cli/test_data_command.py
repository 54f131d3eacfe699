"""``shoal data``: builds, shows and checks files of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.data import TokenFile
from shoal.data.metric_files import Rows
from shoal.errors import UsageError


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text, "body": text.upper()}) + "\n" for text in ("fish", "", "shoal")))
    return path


def test_text_is_built_shown_and_checked(tmp_path: Path, lines: Path) -> None:
    out = tmp_path / "tokens"
    assert run("build", lines, "--out", out) == f"{out}: 2 documents, 11 tokens\n"
    assert run("show", out).splitlines() == [
        "documents    2, of 5 to 6 tokens, median 6",
        "tokens       11, uint8",
        "vocabulary   256, largest token 115",
        "tokenizer    bytes bytes",
        f"fingerprint  {TokenFile(out).fingerprint}",
    ]
    assert run("show", out, "--document", 1) == f"{out}/tokens.bin, byte 5\nshoal\0\n"
    assert run("check", out, "--vocab-size", 116) == f"{out}: 2 documents, 11 tokens, no problem\n"
    with pytest.raises(UsageError, match="has 2 documents, 0 to 1"):
        run("show", out, "--document", 2)
    with pytest.raises(UsageError, match=r"(?s)has the token 115.*has 1 documents of more than 5 tokens"):
        run("check", out, "--vocab-size", 115, "--max-length", 5)
    with pytest.raises(UsageError, match="exists"):
        run("build", lines, "--out", out)
    run("build", lines, "--out", out, "--overwrite", "--field", "body")
    assert TokenFile(out).tokens(1).tobytes() == b"SHOAL\0"


def test_files_of_tokens_are_joined(tmp_path: Path, lines: Path) -> None:
    run("build", lines, "--out", tmp_path / "a")
    megatron = tmp_path / "a" / "tokens"
    assert "fingerprint" in run("show", f"{megatron}.idx")
    assert run("show", megatron, "--document", 0) == f"{megatron}.bin, byte 0\n{[*b'fish', 0]}\n"
    run("build", megatron, tmp_path / "a", "--out", tmp_path / "b")
    joined = TokenFile(tmp_path / "b")
    assert joined.header is not None
    assert joined.header.vocab_size == 116  # the largest token's, for want of a tokenizer
    assert len(joined) == 4
    for source, *options in ([megatron, "--tokenizer", "bytes"], [tmp_path / "a"]):
        run("build", source, "--out", tmp_path / "c", "--overwrite", *options)
        assert (tmp_path / "c" / "header.json").read_bytes() == (tmp_path / "a" / "header.json").read_bytes()


def test_text_and_tokens_are_not_joined(tmp_path: Path, lines: Path) -> None:
    run("build", lines, "--out", tmp_path / "a")
    with pytest.raises(UsageError, match=r"lines.jsonl: text, while other sources are tokens"):
        run("build", lines, tmp_path / "a", "--out", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match=r"lines.jsonl.idx is missing"):
        run("show", lines)


def test_documents_are_measured(tmp_path: Path, lines: Path) -> None:
    tokens, out = tmp_path / "tokens", tmp_path / "analysis"
    run("build", lines, "--out", tokens)
    assert run("analyse", tokens, "--metric", "seqlen", "--metric", "vocabularyrarity", "-o", out) == (
        f"{out}: seqlen, vocabularyrarity of 2 documents\n"
    )
    lengths = Rows(out / "seqlen" / "seqlen_sample_to_metric").together()
    assert lengths.tolist() == TokenFile(tokens).lengths.tolist()
    counts = Rows(out / "total_vocab_freq" / "total_vocab_freq_metric_value").together()
    assert counts.sum() == 11 and counts[ord("s")] == 2
    assert len(Rows(out / "vocabularyrarity" / "vocabularyrarity_sample_to_metric")) == 2
    with pytest.raises(UsageError, match="no metric 'length'"):
        run("analyse", tokens, "--metric", "length", "-o", out)
