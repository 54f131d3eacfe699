"""Documents of text by the name of their source; what cannot be read is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from shoal.data.sources.documents import Document, form_of, identity, read_files
from shoal.errors import UsageError

LINES = b'{"text": "one"}\n\n{"text": "two \xc3\xa9", "id": 2}\n{"text": ""}'


def read(name: str | Path, cache: Path | str = "unused", **options: str) -> list[Document]:
    return [each for _, documents in read_files(str(name), cache=cache, **options) for each in documents]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a/b.jsonl", "jsonl"),
        ("b.ndjson.gz", "jsonl"),
        ("s3://bucket/part-*.jsonl.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("a-{000..127}.tar", "tar"),
        ("a.tar.gz", "tar"),
        ("hf:name:train", "huggingface"),
        ("notes.txt", "text"),
        ("notes", "text"),
        ("notes/**/*.md", "text"),
        ("notes.txt.gz", "text"),
    ],
)
def test_the_name_tells_the_form(name: str, form: str) -> None:
    assert form_of(name) == form


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_lines_are_documents_compressed_or_not(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(LINES))
    assert read(tmp_path / f"a.jsonl{suffix}") == ["one", "two é", ""]


def test_patterns_and_ranges_name_files_in_order(tmp_path: Path) -> None:
    for name in ("p-10", "p-09", "p-08", "q-01"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert read(tmp_path / "p-*.jsonl") == ["p-08", "p-09", "p-10"]
    assert read(tmp_path / "p-{08..10}.jsonl") == ["p-08", "p-09", "p-10"]
    with pytest.raises(UsageError, match=r"no file at .*p-11.jsonl"):
        read(tmp_path / "p-{10..11}.jsonl")
    with pytest.raises(UsageError, match=r"no file at .*r-\*.jsonl"):
        read(tmp_path / "r-*.jsonl")


def test_another_field_and_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "body": "b"}))
    assert read(tmp_path / "a.jsonl", field="messages") == [messages]
    assert read(tmp_path / "a.jsonl", field="body") == ["b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"body": "x"}', r"line 2 of .*a.jsonl has no text in the field 'text'; it has 'body'"),
        (b'{"text": 3}', r"line 2 of .*a.jsonl has no text in the field 'text'"),
        (b'{"text": [1]}', r"line 2 of .*a.jsonl has no text in the field 'text'"),
        (b"[1]", r"line 2 of .*a.jsonl has no text .*it is a list"),
        (b'{"text": ', r"line 2 of .*a.jsonl is not JSON"),
        (b"\xff\xfe", r"line 2 of .*a.jsonl is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' + line)
    with pytest.raises(UsageError, match=words):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("cut", "words"), [(30, "EOFError"), (0, "")])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, cut: int, words: str) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES)[:cut] or b"not compressed")
    with pytest.raises(UsageError, match=rf"a.jsonl.gz cannot be read: .*{words}"):
        read(tmp_path / "a.jsonl.gz")


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_members_of_tar_files_are_documents(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tar.gz" if mode == "w:gz" else "a.tar")
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.addfile(tarfile.TarInfo("folder.txt/"))
        add(archive, "d.1/001.txt", b"one")
        add(archive, "d.1/001.jpg", b"\0\1")
        add(archive, "d.1/002.json", b'{"text": "two"}')
    assert read(path) == ["one", "two"]


def test_tar_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "001.jpg", b"\0\1")
    with pytest.raises(UsageError, match=r"a.tar has no member that ends in .txt or .json"):
        read(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "7/001.json", b"{")
    with pytest.raises(UsageError, match=r"7/001.json in .*a.tar is not JSON"):
        read(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"a.tar cannot be read: ReadError"):
        read(tmp_path / "a.tar")


def test_text_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.md").write_text("a")
    assert read(tmp_path) == ["a", "b"]
    with pytest.raises(UsageError, match="no text file at"):
        read(tmp_path / "missing")


def test_remote_files_are_copied_into_the_cache_once_and_again_when_they_change(tmp_path: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.pipe("/shoal-test/a.jsonl", LINES)
    assert read("memory://shoal-test/*.jsonl", tmp_path) == ["one", "two é", ""]
    copies = list((tmp_path / "files").iterdir())
    before = identity("memory://shoal-test/*.jsonl")
    assert read("memory://shoal-test/a.jsonl", tmp_path) == ["one", "two é", ""]
    assert list((tmp_path / "files").iterdir()) == copies
    remote.pipe("/shoal-test/a.jsonl", b'{"text": "new"}')
    assert read("memory://shoal-test/a.jsonl", tmp_path) == ["new"]
    assert identity("memory://shoal-test/*.jsonl") != before
    with pytest.raises(UsageError, match=r"nowhere://a.jsonl cannot be read"):
        read("nowhere://a.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("name", "module"),
    [("a.parquet", "pyarrow.parquet"), ("hf:name", "datasets"), ("a.jsonl.zst", "zstandard")],
)
def test_a_missing_library_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("fsspec.compression.compr", {})
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(UsageError, match=rf"(?s)needs '{module.partition('.')[0]}'.*pip install 'shoal\[data\]'"):
        read(name if name.startswith("hf:") else tmp_path / name)


def test_what_changes_a_source_changes_its_identity(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(LINES)
        before = identity(str(tmp_path / name))
        assert identity(str(tmp_path / name)) == before
        (tmp_path / name).write_bytes(LINES + b"\n")
        assert identity(str(tmp_path / name)) != before
