"""Token files: written whole or not at all, read by parts, damage named before the first step."""

from __future__ import annotations

import copy
import json
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ByteTokenizer, TokenFile, TokenFileWriter, TokenSource, open_source
from shoal.errors import UsageError

MIB = 1 << 20


def written(path: Path, documents: list[list[int]], vocab_size: int = 1000) -> TokenFile:
    with TokenFileWriter(path, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.write(document)
    return TokenFile(path)


def large(path: Path) -> Path:
    """Three chunks and a half of 16-bit tokens, in documents of 1,000."""
    tokens = np.arange(7 * MIB // 4) % 50_000
    with TokenFileWriter(path, vocab_size=50_000) as writer:
        writer.write(tokens, np.diff(np.append(np.arange(0, len(tokens), 1000), len(tokens))))
    return path


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "u1"), (257, "u2"), (65536, "u2"), (65537, "i4")])
def test_documents_are_read_back_whole_and_in_part(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    documents = [[5, 6, 7], [], [vocab_size - 1], [1, 2]]
    source: TokenSource = written(tmp_path / "t", documents, vocab_size)
    assert [source.tokens(index).tolist() for index in range(4)] == documents
    assert source.lengths.tolist() == [3, 0, 1, 2]
    assert source.tokens(0).dtype == np.dtype(dtype)
    assert source.tokens(0, 1).tolist() == [6, 7]
    assert source.tokens(0, 0, 2).tolist() == [5, 6]
    assert source.tokens(0, 2, 99).tolist() == [7]
    assert source.tokens(0, 2, 1).tolist() == []
    assert source.place(3) == (str(tmp_path / "t" / "tokens.bin"), 4 * np.dtype(dtype).itemsize)
    assert (tmp_path / "t" / "tokens.bin").stat().st_size == 6 * np.dtype(dtype).itemsize


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=20), min_size=1, max_size=20).filter(any))
def test_any_documents_are_read_back(documents: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = written(Path(folder) / "t", documents, 70_001)
        assert [source.tokens(index).tolist() for index in range(len(documents))] == documents
        assert source.largest_token == max(map(max, filter(None, documents)))


def test_documents_written_together_and_one_by_one_give_the_same_bytes(tmp_path: Path) -> None:
    written(tmp_path / "one", [[1, 2], [3]])
    with TokenFileWriter(tmp_path / "two", vocab_size=1000) as writer:
        writer.write([1, 2, 3], [2, 1])
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_an_exception_leaves_no_file_and_keeps_the_one_that_was_there(tmp_path: Path) -> None:
    written(tmp_path / "t", [[1, 2]])

    def broken() -> None:
        with TokenFileWriter(tmp_path / "t", vocab_size=9, overwrite=True) as writer:
            writer.write([3])
            raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        broken()
    assert os.listdir(tmp_path) == ["t"]
    assert TokenFile(tmp_path / "t").tokens(0).tolist() == [1, 2]


def test_a_file_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    before = written(tmp_path / "t", [[1, 2]]).fingerprint
    with pytest.raises(UsageError, match="exists"):
        TokenFileWriter(tmp_path / "t", vocab_size=9)
    with TokenFileWriter(tmp_path / "t", vocab_size=1000, overwrite=True) as writer:
        writer.write([3])
    assert TokenFile(tmp_path / "t").tokens(0).tolist() == [3]
    assert TokenFile(tmp_path / "t").fingerprint != before
    assert os.listdir(tmp_path) == ["t"]


@pytest.mark.parametrize("token", [-1, 1000])
def test_a_token_outside_of_the_vocabulary_is_not_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} in document 1 is outside of the vocabulary"):
        written(tmp_path / "t", [[1], [2, token]])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_a_file_without_tokens_is_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="no documents, or all of them empty"):
        written(tmp_path / "t", documents)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "checksums.bin"])
def test_a_truncated_longer_or_missing_file_is_named_at_open(tmp_path: Path, name: str) -> None:
    file = large(tmp_path / "t") / name
    size = file.stat().st_size
    words = rf"{name} has (changed|{size - 1:,} bytes)"
    os.truncate(file, size - 1)
    with pytest.raises(UsageError, match=words) as caught:
        TokenFile(tmp_path / "t")
    assert "shoal data build" in str(caught.value)
    os.truncate(file, size + 1)
    with pytest.raises(UsageError, match=rf"{name} has (changed|{size + 1:,} bytes in place of {size:,})"):
        TokenFile(tmp_path / "t")
    file.unlink()
    with pytest.raises(UsageError, match=rf"{name} is missing"):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize("name", ["tokens.idx", "checksums.bin"])
def test_changed_offsets_and_checksums_are_named_at_open(tmp_path: Path, name: str) -> None:
    flip(large(tmp_path / "t") / name, 9 if name == "checksums.bin" else 40)
    with pytest.raises(UsageError, match=f"{name} has changed"):
        TokenFile(tmp_path / "t")


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as data:
        data.seek(at)
        value = data.read(1)[0]
        data.seek(at)
        data.write(bytes([value ^ 1]))


def test_changed_tokens_are_named_by_chunk(tmp_path: Path) -> None:
    path = large(tmp_path / "t")
    flip(path / "tokens.bin", 2 * MIB + 5)
    with pytest.raises(UsageError, match=r"tokens.bin has changed in chunk 2 \(bytes 2,097,152 to 3,145,728\)"):
        TokenFile(path)


def test_all_changed_chunks_are_named_by_a_full_check_where_the_sample_misses_them(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "t", vocab_size=256) as writer:
        writer.write(np.zeros(20 * MIB, np.uint8))
    for chunk in (1, 19):
        flip(tmp_path / "t" / "tokens.bin", chunk * MIB)
    with pytest.raises(UsageError, match=r"in chunk 19 \("):
        TokenFile(tmp_path / "t")
    flip(tmp_path / "t" / "tokens.bin", 19 * MIB)
    TokenFile(tmp_path / "t")  # verifies 8 of 20 chunks
    with pytest.raises(UsageError, match=r"in chunk 1 \("):
        TokenFile(tmp_path / "t", verify=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 2}, "version"), ({"num_tokens": 0}, "num_tokens"), ({"more": 1}, "more"), (None, "Invalid JSON")],
)
def test_a_damaged_header_is_named(tmp_path: Path, change: dict[str, object] | None, words: str) -> None:
    header = written(tmp_path / "t", [[1, 2]]).path / "header.json"
    text = json.loads(header.read_text())
    header.write_text(json.dumps(text | change) if change else header.read_text()[:-9])
    with pytest.raises(UsageError, match=f"header.json is damaged: .*{words}"):
        TokenFile(tmp_path / "t")


def test_a_missing_header_is_named(tmp_path: Path) -> None:
    (large(tmp_path / "t") / "header.json").unlink()
    for opened in (TokenFile, open_source):
        with pytest.raises(UsageError, match=r"header.json is missing"):
            opened(tmp_path / "t")


def test_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)\.idx is missing.*shoal data build"):
        TokenFile(tmp_path)


def test_the_tokenizer_is_named_and_a_copy_in_another_process_maps_the_file(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "t", tokenizer=ByteTokenizer()) as writer:
        writer.write(list(b"fish") + [0])
    source = TokenFile(tmp_path / "t")
    assert source.header is not None
    assert (source.header.tokenizer, source.header.end_of_text, source.tokenizer_path) == ("bytes", 0, "bytes")
    assert source.__reduce__() == (TokenFile, (tmp_path / "t",))
    assert copy.copy(source).tokens(0).tobytes() == b"fish\0"


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges of bytes that mappings ask the system to read."""
    ranges: list[tuple[int, int]] = []

    class Recorded(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            assert option == mmap.MADV_WILLNEED
            assert length is not None
            ranges.append((start, start + length))
            super().madvise(option, start, length)

    monkeypatch.setattr("shoal.data.sources.indexed.mmap.mmap", Recorded)
    return ranges


def test_a_part_of_a_document_reads_the_pages_that_it_is_in(tmp_path: Path, asked_for: list[tuple[int, int]]) -> None:
    source = TokenFile(large(tmp_path / "t"))
    asked_for.clear()
    part = source.tokens(100, 40, 900)  # bytes 200,080 to 201,800; pages of 4 KiB begin at 196,608 and 200,704
    assert part.tolist() == [(100_000 + at) % 50_000 for at in range(40, 900)]
    assert not part.flags.owndata
    assert not part.flags.writeable
    source.tokens(100, 5, 5)
    if mmap.PAGESIZE == 4096:
        assert asked_for == [(196_608, 201_800)]
    else:
        assert len(asked_for) == 1
