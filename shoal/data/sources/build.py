"""Documents of text to files of tokens, by several processes; the result does not depend on how many.

A file of tokens is written in a hidden folder, with a record of each batch of documents. A build that is killed leaves
both, and the next one goes on behind the batches whose text has not changed.

    .OUT.kept/tokens.bin       becomes OUT/tokens.bin
    .OUT.kept/tokens.batches   uint64 xxh64 of what the file of text is, documents, bytes of tokens, xxh64 of what
                               follows and of the tokens; int64 [documents]: their tokens; and so on
                               at the end of a file of text: its xxh64, 2^64 - 1, 0, xxh64 of nothing
    .OUT.kept/old.*            the same of a build before, where a file of text has changed and later ones have not
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import secrets
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.sources.documents import Document
from shoal.data.sources.source import TokenSource
from shoal.data.sources.token_file import TokenFileWriter
from shoal.data.tokenizers import Tokenizer, load_tokenizer
from shoal.errors import UsageError

_BATCH = 256  # documents that a process tokenises at a time
_QUEUED_PER_WORKER = 4  # batches that are read ahead
_COPIED_TOKENS = 1 << 20
_VERSION = 2  # of kept tokens
_RECORD = struct.Struct("<QQQQ")
_END = 2**64 - 1

Tokens = tuple[NDArray[Any], NDArray[np.int64]]  # of some documents, and the length of each


def build(
    files: Iterable[tuple[Any, Iterable[Document]]],
    tokenizer: str | None,
    writer: TokenFileWriter,
    *,
    num_workers: int = 1,
    on_batch: Callable[[], None] = lambda: None,
) -> int:
    """Tokenise documents and write them in their order; empty ones are left out.

    Args:
        files: of each what changes when it does (None: its tokens are not kept), and its documents.
        tokenizer: what ``load_tokenizer`` reads, in each process.
        num_workers: processes that tokenise; 1: this one.
        on_batch: called after each batch that has been written.

    Returns: documents that an earlier build had tokenised, which was killed.

    Raises: UsageError: a conversation, and a tokenizer without a chat template; a process that died.
    """
    fingerprint, num_kept = load_tokenizer(tokenizer).fingerprint, 0
    keyed, seen = [], Counter[str]()
    for identity, documents in files:
        given = json.dumps([_VERSION, identity, fingerprint, _BATCH])
        number = secrets.randbits(63) if identity is None else seen[given]
        seen[given] += 1  # a file may be named twice
        keyed.append((xxhash.xxh64_intdigest(f"{given}{number}".encode()), documents))
    kept = _UnfinishedTokens(writer, [key for key, _ in keyed])

    def work() -> Iterator[tuple[int, _Item]]:
        for key, documents in keyed:
            batches = kept.batches.get(key, [])
            yield from ((key, batch) for batch in batches)
            if key not in kept.whole:
                yield from ((key, batch) for batch in itertools.islice(_batches(documents), len(batches), None))
            yield key, None

    for key, item, tokens in _tokenised(work(), tokenizer, num_workers):
        if isinstance(item, _DocumentBatch):
            tokens = np.fromfile(item.data, writer.dtype, item.num_tokens, offset=item.start), item.lengths
            num_kept += len(item.lengths)
        if tokens is not None:
            writer.write(*tokens)
        kept.add(key, item, tokens)
        if tokens is not None:
            on_batch()
    return num_kept


class _DocumentBatch(NamedTuple):
    """Tokens of some documents."""

    data: Path
    start: int  # byte
    lengths: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


_Item = _DocumentBatch | list[Document] | None  # tokens, documents, or the end of a file of text


class _FileBatches(NamedTuple):
    """Of one file of text."""

    batches: list[_DocumentBatch]
    is_whole: bool = False  # there are no more


_NOTHING = _FileBatches([])


class _UnfinishedTokens:
    """The tokens that killed builds have left, and the records of this one.

    Attributes:
        batches: by file of text, those that are there.
        whole: files of text of which there are no more.
    """

    def __init__(self, writer: TokenFileWriter, keys: list[int]) -> None:
        self._writer = writer
        self.batches: dict[int, list[_DocumentBatch]] = {}
        self.whole: set[int] = set()
        self._folder = folder = writer.kept_folder()
        if folder is None:
            return
        self._data, self._records = folder / "tokens.bin", folder / "tokens.batches"
        self._nbytes = 0  # of records, up to the last batch that this build has written
        self._there = _read(self._data, self._records)
        order = list(self._there)
        num_same = next((at for at, (a, b) in enumerate(zip(order, keys, strict=False)) if a != b), len(order))
        if {*order[num_same:]} & {*keys}:
            self._data.replace(folder / "old.bin")
            self._records.replace(folder / "old.batches")
            num_same = 0
        self._there = {key: self._there[key] for key in order[:num_same]}  # where this build will write them
        old = _read(folder / "old.bin", folder / "old.batches")
        for key in keys:
            mine, other = self._there.get(key, _NOTHING), old.get(key, _NOTHING)
            self.batches[key] = mine.batches + other.batches[len(mine.batches) :]
            if mine.is_whole or other.is_whole:
                self.whole.add(key)
        self._records.touch()
        writer.continue_in(self._data)

    def add(self, key: int, item: _Item, tokens: Tokens | None) -> None:
        """Record what has been written: the tokens of ``item``, or the end of a file of text."""
        if self._folder is None:
            return
        lengths = b"" if tokens is None else tokens[1].astype("<i8").tobytes()
        is_end_there = item is None and self._there.get(key, _NOTHING).is_whole
        if is_end_there or (isinstance(item, _DocumentBatch) and item.data == self._data):
            self._nbytes += _RECORD.size + len(lengths)
            return
        values = b"" if tokens is None else tokens[0].astype(self._writer.dtype).tobytes()
        num = _END if tokens is None else len(tokens[1])
        record = _RECORD.pack(key, num, len(values), xxhash.xxh64_intdigest(lengths + values)) + lengths
        self._writer.flush()
        with suppress(FileNotFoundError), open(self._records, "r+b") as file:  # the user may remove the folder
            file.truncate(self._nbytes)
            file.seek(self._nbytes)
            file.write(record)
        self._nbytes += len(record)


def _read(data: Path, records: Path) -> dict[int, _FileBatches]:
    """The batches of two files, by file of text. One that is cut off or damaged ends them."""
    result: dict[int, _FileBatches] = {}
    if not (data.is_file() and records.is_file()):
        return result
    size = data.stat().st_size
    with open(data, "rb") as values, open(records, "rb") as heads:
        while len(head := heads.read(_RECORD.size)) == _RECORD.size:
            key, num, nbytes, checksum = _RECORD.unpack(head)
            start, lengths = values.tell(), b"" if num == _END else heads.read(8 * num)
            if start + nbytes > size or xxhash.xxh64_intdigest(lengths + values.read(nbytes)) != checksum:
                break
            file = result.setdefault(key, _FileBatches([]))
            if num == _END:
                result[key] = file._replace(is_whole=True)
            else:
                file.batches.append(_DocumentBatch(data, start, np.frombuffer(lengths, "<i8")))
    return result


def copy(source: TokenSource, writer: TokenFileWriter, *, on_batch: Callable[[], None] = lambda: None) -> None:
    """Write the documents of a source, as they are."""
    ends = np.cumsum(source.lengths)
    first = 0
    while first < len(source):
        begin = ends[first] - source.lengths[first]
        last = max(first + 1, int(np.searchsorted(ends, begin + _COPIED_TOKENS, side="right")))
        parts = [source.tokens(index) for index in range(first, last)]
        writer.write(np.concatenate(parts), source.lengths[first:last])
        on_batch()
        first = last


def tokens_of(documents: Iterable[Document], tokenizer: Tokenizer) -> Tokens:
    """Each document that is not empty, ended by the end-of-text token where there is one."""
    parts: list[NDArray[Any]] = []
    for document in documents:
        numbers = tokenizer.encode(_as_text(document, tokenizer))
        if numbers:
            values = np.frombuffer(numbers, np.uint8) if isinstance(numbers, bytes) else np.asarray(numbers, np.int32)
            parts.append(
                values if tokenizer.end_of_text is None else np.append(values, np.int32(tokenizer.end_of_text))
            )
    return np.concatenate([np.empty(0, np.int32), *parts]), np.array([len(part) for part in parts], dtype=np.int64)


def _as_text(document: Document, tokenizer: Tokenizer) -> str:
    if isinstance(document, str):
        return document
    format_chat: Callable[[Document], str] | None = getattr(tokenizer, "format_chat", None)
    if format_chat is None:
        raise UsageError(
            f"a document is a conversation, and the tokenizer {tokenizer.name} has no chat template.",
            do="give the folder of a Transformers tokenizer, or name a field of text.",
        )
    return format_chat(document)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


@cache
def _loaded(tokenizer: str | None) -> Tokenizer:
    return load_tokenizer(tokenizer)


def _tokenise(batch: list[Document], tokenizer: str | None) -> Tokens:
    """In a process of the pool, which loads the tokenizer once."""
    return tokens_of(batch, _loaded(tokenizer))


def _tokenised(
    work: Iterator[tuple[int, _Item]], tokenizer: str | None, num_workers: int
) -> Iterator[tuple[int, _Item, Tokens | None]]:
    """What there is to do, in its order, with the tokens of documents."""
    if num_workers == 1:
        loaded = load_tokenizer(tokenizer)
        yield from ((key, item, tokens_of(item, loaded) if isinstance(item, list) else None) for key, item in work)
        return
    queue: deque[tuple[int, _Item, Future[Tokens] | None]] = deque()

    def first() -> tuple[int, _Item, Tokens | None]:
        key, item, tokens = queue.popleft()
        return key, item, None if tokens is None else tokens.result()

    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for key, item in work:
                made = pool.submit(_tokenise, item, tokenizer) if isinstance(item, list) else None
                queue.append((key, item, made))
                if len(queue) == num_workers * _QUEUED_PER_WORKER:
                    yield first()
            while queue:
                yield first()
        except BrokenProcessPool as error:
            raise UsageError("a process that tokenises died.", do="use fewer --workers; it may lack memory.") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
