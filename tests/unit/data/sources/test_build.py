"""Text to files of tokens, with the same bytes for any number of processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shoal.data import ByteTokenizer, InMemorySource, TokenFile, TokenFileWriter
from shoal.data.sources import build as building
from shoal.data.sources.build import build, copy, tokens_of
from shoal.data.sources.documents import Document, read_files
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
            build([(None, texts)], None, writer, num_workers=workers, on_batch=lambda: calls.append(1))
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
        build([(None, broken())], None, writer, num_workers=2)
    assert not [*tmp_path.iterdir()]  # no batch was written


def test_a_build_without_a_token_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="no documents"),
        TokenFileWriter(tmp_path / "t", tokenizer=ByteTokenizer()) as writer,
    ):
        build([(["a"], iter([""]))], None, writer)
    assert not [*tmp_path.iterdir()]
    for documents in (
        ["fish"],
        [],
    ):  # nothing was read when the second one fails, and the tokens of the first are there
        with pytest.raises(KeyError), TokenFileWriter(tmp_path / "t", tokenizer=ByteTokenizer()) as writer:
            build([(["a"], iter(documents))], None, writer, on_batch=lambda: {}["stop"])
        assert (tmp_path / ".t.kept" / "tokens.bin").read_bytes() == b"fish\0"


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


class Counted(ByteTokenizer):
    """Counts the documents that it tokenises."""

    num = 0

    def encode(self, text: str) -> Sequence[int]:
        self.num += 1
        return super().encode(text)


def test_a_build_that_is_killed_goes_on_where_it_was_and_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[f"{name} {number} " * (number % 5) for number in range(num)] for name, num in (("a", 600), ("b", 900))]
    for name, lines in zip("ab", texts, strict=True):
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(content, encoding="utf-8")
    tokenizer = Counted()
    monkeypatch.setattr(building, "load_tokenizer", lambda name: tokenizer)

    def run(out: str, on_batch: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Returns: documents that an earlier build left, and those that were tokenised."""
        tokenizer.num = 0
        with TokenFileWriter(tmp_path / out, tokenizer=ByteTokenizer(), overwrite=True) as writer:
            kept = build(read_files(str(tmp_path / "*.jsonl"), cache=tmp_path), None, writer, on_batch=on_batch)
        return kept, tokenizer.num

    def kill_at(num: int) -> None:
        """A build in a process that is killed after so many batches."""
        child = os.fork()
        if not child:
            batches = itertools.count(1)
            run("out", lambda: os.kill(os.getpid(), signal.SIGKILL) if next(batches) == num else None)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def same() -> bool:
        files = {path.name for path in (tmp_path / "whole").iterdir()}
        return all((tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in files)

    def nbytes() -> int:
        """Of tokens on the disk."""
        return sum(path.stat().st_size for path in tmp_path.rglob("*.bin") if path.stem != "checksums")

    sizes: list[int] = []
    assert run("whole", lambda: sizes.append(nbytes())) == (0, 1500)
    assert sizes[-1] == nbytes() > sizes[0] > 0  # once, while it is built and afterwards
    left = sum(map(bool, [*texts[0], *texts[1][:512]]))  # each fifth document is empty
    kill_at(1)
    kill_at(5)  # 3 of a, 2 of b, of which the first is read from what was left
    assert run("out") == (left, 1500 - 600 - 512)
    assert same() and not (tmp_path / ".out.kept").exists()

    kill_at(6)
    os.utime(tmp_path / "a.jsonl", (1, 1))  # a changed file is read anew, and the other one is not
    last = max((tmp_path / ".out.kept").iterdir(), key=lambda path: path.stat().st_size)
    last.write_bytes(last.read_bytes()[:-1])  # its last batch is cut off
    kill_at(4)  # 3 of a again, 1 of b from what was left
    kill_at(4)  # none is new
    assert {path.stem for path in (tmp_path / ".out.kept").iterdir()} == {"lock", "tokens", "old"}
    assert run("out") == (left, 900 - 512)
    assert same()

    kill_at(7)
    (tmp_path / "a.jsonl").rename(tmp_path / "c.jsonl")  # b is the first now
    assert run("out") == (sum(map(bool, texts[1])), 600)
    tokens, others = ((tmp_path / out / "tokens.bin").read_bytes() for out in ("out", "whole"))
    assert tokens != others and sorted(tokens) == sorted(others)
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_a_file_that_is_named_twice_is_there_twice_and_one_build_keeps_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fish"}\n' * 300, encoding="utf-8")

    def files() -> Iterator[tuple[object, Iterator[Document]]]:
        for _ in range(2):
            yield from read_files(str(tmp_path / "a.jsonl"), cache=tmp_path)

    with TokenFileWriter(tmp_path / "out", tokenizer=ByteTokenizer(), overwrite=True) as first:
        build(files(), None, first)
        kept = tmp_path / ".out.kept"
        assert len([*kept.iterdir()]) == 3
        with TokenFileWriter(tmp_path / "out", tokenizer=ByteTokenizer(), overwrite=True) as second:
            assert build(files(), None, second) == 0  # the folder is another writer's
        assert len([*kept.iterdir()]) == 3
        shutil.rmtree(kept)
        build(files(), None, first)  # without the folder, which a user may remove
    assert len(TokenFile(tmp_path / "out")) == 1200 and not kept.exists()
