"""Documents of text to files of tokens, by several processes; the result does not depend on how many.

While a file of tokens is written, the tokens of each file of text are also appended to one of their own, batch by batch
with a checksum. A build that is killed leaves them, and the next one reads them in place of the text.

    .OUT.kept/HASH    uint64 documents, bytes of tokens, xxh64 of what follows
                      int64 [documents]: their tokens; the tokens, little-endian
                      and so on; at the end 24 bytes of 255
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

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
_VERSION = 1  # of kept tokens
_RECORD = struct.Struct("<QQQ")
_END = bytes([255]) * _RECORD.size

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
    folder, fingerprint, num_kept = writer.kept_folder(), load_tokenizer(tokenizer).fingerprint, 0

    def work() -> Iterator[tuple[_TokenJournal, list[Document] | None]]:
        for identity, documents in files:
            key = xxhash.xxh64_hexdigest(json.dumps([_VERSION, identity, fingerprint, _BATCH]).encode())
            kept = _TokenJournal(None if identity is None or folder is None else folder / key, writer.dtype)
            yield kept, None
            if not kept.is_whole:
                yield from ((kept, batch) for batch in itertools.islice(_batches(documents), kept.num_batches, None))

    current = _TokenJournal(None, writer.dtype)
    for kept, tokens in _tokenised(work(), tokenizer, num_workers):
        if kept is not current:
            current.end()
            current = kept
        for each in itertools.islice(kept.read(), kept.num_batches) if tokens is None else [tokens]:
            writer.write(*each)
            if tokens is None:
                num_kept += len(each[1])
            else:
                kept.append(*each)
            on_batch()
    current.end()
    return num_kept


class _TokenJournal:
    """The tokens of one file of text, as far as builds have come.

    Attributes:
        num_batches: those that are there, whole.
        is_whole: there are no more.
    """

    def __init__(self, path: Path | None, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        self._nbytes = 0  # of whole batches
        self.is_whole = False
        self.num_batches = sum(1 for _ in self.read())

    def read(self) -> Iterator[Tokens]:
        """The batches that are there. One that is cut off or damaged ends them."""
        if self._path is None or not self._path.is_file():
            return
        size, self._nbytes = self._path.stat().st_size, 0
        with open(self._path, "rb") as file:
            while len(head := file.read(_RECORD.size)) == _RECORD.size:
                num, nbytes, checksum = _RECORD.unpack(head)
                self.is_whole = head == _END
                if self.is_whole or file.tell() + 8 * num + nbytes > size:
                    return
                content = file.read(8 * num + nbytes)
                if xxhash.xxh64_intdigest(content) != checksum:
                    return
                self._nbytes = file.tell()
                yield np.frombuffer(content, self._dtype, offset=8 * num), np.frombuffer(content, "<i8", num)

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        values = tokens.astype(self._dtype).tobytes()
        content = lengths.astype("<i8").tobytes() + values
        self._write(_RECORD.pack(len(lengths), len(values), xxhash.xxh64_intdigest(content)) + content)

    def end(self) -> None:
        """There are no more batches."""
        if not self.is_whole:
            self._write(_END)

    def _write(self, content: bytes) -> None:
        if self._path is not None:
            with suppress(FileNotFoundError), open(self._path, "ab") as file:  # the user may remove the folder
                file.truncate(self._nbytes)
                file.write(content)
            self._nbytes += len(content)


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
    work: Iterator[tuple[_TokenJournal, list[Document] | None]], tokenizer: str | None, num_workers: int
) -> Iterator[tuple[_TokenJournal, Tokens | None]]:
    """The batches as tokens, in their order; None stays what it is."""
    if num_workers == 1:
        loaded = load_tokenizer(tokenizer)
        yield from ((kept, None if batch is None else tokens_of(batch, loaded)) for kept, batch in work)
        return
    queue: deque[tuple[_TokenJournal, Future[Tokens] | None]] = deque()

    def first() -> tuple[_TokenJournal, Tokens | None]:
        kept, tokens = queue.popleft()
        return kept, None if tokens is None else tokens.result()

    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for kept, batch in work:
                queue.append((kept, None if batch is None else pool.submit(_tokenise, batch, tokenizer)))
                if len(queue) == num_workers * _QUEUED_PER_WORKER:
                    yield first()
            while queue:
                yield first()
        except BrokenProcessPool as error:
            raise UsageError("a process that tokenises died.", do="use fewer --workers; it may lack memory.") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
