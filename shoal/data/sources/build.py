"""Documents of text to files of tokens, by several processes; the result does not depend on how many."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.sources.documents import Document
from shoal.data.sources.source import TokenSource
from shoal.data.sources.token_file import TokenFileWriter
from shoal.data.tokenizers import Tokenizer, load_tokenizer
from shoal.errors import UsageError

_BATCH = 256  # documents that a process tokenises at a time
_QUEUED_PER_WORKER = 4  # batches that are read ahead
_COPIED_TOKENS = 1 << 20

Tokens = tuple[NDArray[Any], NDArray[np.int64]]  # of some documents, and the length of each


def build(
    documents: Iterable[Document],
    tokenizer: str | None,
    writer: TokenFileWriter,
    *,
    num_workers: int = 1,
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    """Tokenise documents and write them in their order; empty ones are left out.

    Args:
        tokenizer: what ``load_tokenizer`` reads, in each process.
        num_workers: processes that tokenise; 1: this one.
        on_batch: called after each batch that has been written.

    Raises: UsageError: a conversation, and a tokenizer without a chat template; a process that died.
    """
    for tokens, lengths in _tokenised(_batches(documents), tokenizer, num_workers):
        writer.write(tokens, lengths)
        on_batch()


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


def _tokenised(batches: Iterator[list[Document]], tokenizer: str | None, num_workers: int) -> Iterator[Tokens]:
    """The batches as tokens, in their order."""
    if num_workers == 1:
        loaded = load_tokenizer(tokenizer)
        yield from (tokens_of(batch, loaded) for batch in batches)
        return
    queue: deque[Future[Tokens]] = deque()
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for batch in batches:
                queue.append(pool.submit(_tokenise, batch, tokenizer))
                if len(queue) == num_workers * _QUEUED_PER_WORKER:
                    yield queue.popleft().result()
            while queue:
                yield queue.popleft().result()
        except BrokenProcessPool as error:
            raise UsageError("a process that tokenises died.", do="use fewer --workers; it may lack memory.") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
