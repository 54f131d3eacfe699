"""Text to files of tokens, with the same bytes for any number of processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shoal.data import ByteTokenizer, InMemorySource, TokenFile, TokenFileWriter
from shoal.data.sources.build import build, copy, tokens_of
from shoal.errors import UsageError


class Words(ByteTokenizer):
    """Words of letters by their number; no token ends a document."""

    vocab_size = 70_000
    end_of_text = None

    def encode(self, text: str) -> Sequence[int]:
        return [int(word) for word in text.split()]


def test_documents_end_with_the_end_of_text_token_and_empty_ones_are_left_out() -> None:
    tokens, lengths = tokens_of(["ab", "", "é"], ByteTokenizer())
    assert tokens.tolist() == [97, 98, 0, 195, 169, 0]
    assert lengths.tolist() == [3, 3]
    tokens, lengths = tokens_of(["7 69999", " ", "3"], Words())
    assert (tokens.tolist(), lengths.tolist()) == ([7, 69999, 3], [2, 1])
    tokens, lengths = tokens_of([], Words())
    assert (len(tokens), len(lengths)) == (0, 0)


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    texts = [f"document {number} " * (number % 7) for number in range(3000)]
    calls = []
    for workers in (1, 2):
        with TokenFileWriter(tmp_path / str(workers), tokenizer=ByteTokenizer()) as writer:
            build(iter(texts), None, writer, num_workers=workers, on_batch=lambda: calls.append(1))
    assert len(calls) == 2 * 12  # batches of 256
    for file in sorted((tmp_path / "1").iterdir()):
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()
    source = TokenFile(tmp_path / "2", verify=True)
    written = [text for text in texts if text]
    assert [source.tokens(index).tobytes() for index in range(len(source))] == [
        text.encode() + b"\0" for text in written
    ]


def test_what_a_source_raises_ends_the_workers_and_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield from ["text"] * 600
        raise UsageError("line 601 is not JSON.")

    with (
        pytest.raises(UsageError, match="line 601"),
        TokenFileWriter(tmp_path / "t", tokenizer=ByteTokenizer()) as writer,
    ):
        build(broken(), None, writer, num_workers=2)
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_needs_a_chat_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(UsageError, match="the tokenizer bytes has no chat template"):
        tokens_of([messages], ByteTokenizer())

    class Chat(ByteTokenizer):
        def format_chat(self, messages: list[dict[str, str]]) -> str:
            return "".join(f"<{each['role']}>{each['content']}" for each in messages)

    tokens, _ = tokens_of([messages], Chat())
    assert bytes(tokens.tolist()) == b"<user>hi\0"


def test_documents_of_a_source_are_copied(tmp_path: Path) -> None:
    documents = [[1, 2], [], [3] * 2_000_000, [4], [5]]
    with TokenFileWriter(tmp_path / "t", vocab_size=100) as writer:
        copy(InMemorySource(documents), writer)
    source = TokenFile(tmp_path / "t")
    assert source.lengths.tolist() == [2, 0, 2_000_000, 1, 1]
    for index in range(5):
        assert np.array_equal(source.tokens(index), documents[index])


def test_a_build_that_is_killed_leaves_no_file_and_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    killed = os.fork()
    if not killed:
        with TokenFileWriter(tmp_path / "out", tokenizer=ByteTokenizer()) as writer:
            writer.write([1, 2, 3])
            writer._data.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.tmp-")
    with TokenFileWriter(tmp_path / "out", tokenizer=ByteTokenizer()) as other:
        other.write([4])
        assert left.exists()  # it may be of a writer that has just begun
        for folder in tmp_path.iterdir():
            os.utime(folder / "tokens.bin", (1.0, 1.0))
        with TokenFileWriter(tmp_path / "out", tokenizer=ByteTokenizer()) as writer:
            assert not left.exists()
            writer.write([5])
            assert len([*tmp_path.iterdir()]) == 2  # the one that is being written is locked
        shutil.rmtree(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert TokenFile(tmp_path / "out").tokens(0).tolist() == [4]
