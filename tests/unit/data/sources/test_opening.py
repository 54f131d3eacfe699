"""Sources by their names and blends; all problems are named at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.data import ByteTokenizer, TokenFile, TokenFileWriter, open_source, open_sources
from shoal.data.sources.opening import SourceSpec, parse_sources
from shoal.errors import UsageError


def token_file(path: Path, documents: list[list[int]], vocab_size: int = 1000) -> Path:
    with TokenFileWriter(path, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.write(document)
    return path


def test_names_weights_and_blends_are_parsed(tmp_path: Path) -> None:
    assert parse_sources(["a", "s3://user@host/b.jsonl"]) == [
        SourceSpec(path="a"),
        SourceSpec(path="s3://user@host/b.jsonl"),
    ]
    assert parse_sources(["a@0.3", "hf:b:train@2"]) == [
        SourceSpec(path="a", weight=0.3),
        SourceSpec(path="hf:b:train", weight=2),
    ]
    (tmp_path / "with@2").touch()
    assert parse_sources([tmp_path / "with@2"]) == [SourceSpec(path=str(tmp_path / "with@2"))]


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
@pytest.mark.parametrize(
    "content",
    [
        ["a@0.25", {"path": "b", "weight": 0.75, "epochs": 2, "field": "body"}],
        [{"path": "a", "weight": 0.25}, {"path": "b", "weight": 0.75, "epochs": 2, "field": "body"}],
    ],
)
def test_blends_of_files_are_parsed(tmp_path: Path, write: Any, content: Any) -> None:
    (tmp_path / "blend.yaml").write_text(write(content))
    assert parse_sources([tmp_path / "blend.yaml"]) == [
        SourceSpec(path="a", weight=0.25),
        SourceSpec(path="b", weight=0.75, epochs=2, field="body"),
    ]


def test_a_blend_may_be_a_mapping_of_weights(tmp_path: Path) -> None:
    (tmp_path / "blend.json").write_text('{"a": 1, "b": 3}')
    assert parse_sources([tmp_path / "blend.json"]) == [
        SourceSpec(path="a", weight=1),
        SourceSpec(path="b", weight=3),
    ]


def test_all_problems_of_blends_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- {path: c, weight: -1}\n- {weight: 1}\n- {path: d, weigth: 2}\n- 3\n")
    (tmp_path / "bad.yaml").write_text("[")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError) as caught:
        parse_sources(
            [
                "a@much",
                "b@0",
                "b@nan",
                tmp_path / "list.yaml",
                tmp_path / "bad.yaml",
                tmp_path / "empty.yaml",
                "no.json",
            ]
        )
    text = str(caught.value)
    for words in (
        "a@much: {'path': 'a', 'weight': 'much'} is not a source: weight: Input should be a valid number",
        "b@0: {'path': 'b', 'weight': '0'} is not a source: weight: Input should be greater than 0",
        "b@nan: {'path': 'b', 'weight': 'nan'} is not a source: weight: Input should be a finite number",
        "{'path': 'c', 'weight': -1} is not a source: weight",
        "{'weight': 1} is not a source: path: Field required",
        "{'path': 'd', 'weigth': 2} is not a source: weigth",
        "list.yaml: 3 is not a source",
        "bad.yaml cannot be read",
        "empty.yaml has no list of sources",
        "no.json cannot be read",
    ):
        assert words in text
    with pytest.raises(UsageError, match="some sources have weights, but not a, c"):
        parse_sources(["a", "b@2", "c"])
    with pytest.raises(UsageError, match="no source is named"):
        parse_sources([])


def test_files_of_tokens_are_opened_by_their_names(tmp_path: Path) -> None:
    token_file(tmp_path / "t", [[1, 2]])
    for name in ("t", "t/tokens", "t/tokens.idx", "t/tokens.bin"):
        assert open_source(str(tmp_path / name)).tokens(0).tolist() == [1, 2]


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hi", "body": "other"}')

    def opened(**options: Any) -> TokenFile:
        source = open_source(SourceSpec(path=str(tmp_path / "a.jsonl"), **options), cache=tmp_path / "cache")
        assert isinstance(source, TokenFile)
        return source

    first = opened()
    assert first.tokens(0).tobytes() == b"hi\0"
    made = (first.path / "header.json").stat().st_mtime_ns
    assert opened().path == first.path
    assert (first.path / "header.json").stat().st_mtime_ns == made
    assert opened(field="body").tokens(0).tobytes() == b"other\0"
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}')
    assert opened().tokens(0).tobytes() == b"hello\0"


def test_one_of_several_tokenises_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.data.sources import opening

    (tmp_path / "a.txt").write_text("hi")
    builds: list[int] = []
    build = opening.build
    monkeypatch.setattr(opening, "build", lambda *args, **options: (builds.append(1), build(*args, **options)))
    sources: list[Any] = []
    threads = [
        threading.Thread(target=lambda: sources.append(open_source(tmp_path / "a.txt", cache=tmp_path / "c")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [source.tokens(0).tobytes() for source in sources] == [b"hi\0"] * 4
    assert len(builds) == 1


def test_all_problems_of_all_sources_are_named(tmp_path: Path) -> None:
    good = token_file(tmp_path / "good", [[1, 2], [3]])
    long = token_file(tmp_path / "long", [[1], [900] * 11, [2] * 12])
    damaged = token_file(tmp_path / "damaged", [[1]])
    (damaged / "tokens.bin").write_bytes(b"")
    (tmp_path / "empty.jsonl").write_text("\n")
    names = [good, long, damaged, tmp_path / "empty.jsonl", tmp_path / "missing"]
    with pytest.raises(UsageError) as caught:
        open_sources(names, vocab_size=500, max_length=10, cache=tmp_path / "cache")
    text = str(caught.value)
    for words in (
        "long has the token 900; the model's are 0 to 499",
        "long has 2 documents of more than 10 tokens; document 2 has 12",
        "tokens.bin has 0 bytes, and its index names 2",
        "empty.jsonl: no documents, or all of them empty",
        "missing: no text file at",
        ": there is no such path",
    ):
        assert words in text
    assert "good has" not in text
    sources, specs = open_sources([f"{good}@2"], vocab_size=500, max_length=10)
    assert (sources[0].name, specs[0].weight) == (str(good), 2)


def test_tokens_of_megatron_are_compared_with_the_vocabulary_when_they_are_read_whole(tmp_path: Path) -> None:
    path = token_file(tmp_path / "t", [[900]]) / "tokens"
    open_sources([path], vocab_size=500)
    with pytest.raises(UsageError, match="tokens has the token 900"):
        open_sources([path], vocab_size=500, verify=True)


def test_tokens_of_another_tokenizer_are_a_problem_where_one_is_given(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        name, fingerprint = "other", "other"

    with TokenFileWriter(tmp_path / "t", tokenizer=Other()) as writer:
        writer.write([1, 2])
    with pytest.raises(UsageError, match="t was made by the tokenizer other, not by bytes"):
        open_sources([tmp_path / "t"], tokenizer="bytes")
    assert len(open_sources([tmp_path / "t"])[0]) == 1
