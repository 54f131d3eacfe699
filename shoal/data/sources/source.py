"""Documents of tokens by index: what the index, packing and blends read, whatever the format of the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from shoal.errors import UsageError

T = TypeVar("T")


@runtime_checkable
class TokenSource(Protocol):
    """Documents of tokens with indices from 0."""

    name: str  # for messages and replay: a path or a data set's name

    def __len__(self) -> int:
        """Documents."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [documents]; known without reading tokens."""
        ...

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Tokens ``start`` to ``stop`` (default: its end) of a document, without reading the rest; read-only."""
        ...

    # Optional: ``prefetch(index, start, stop)`` starts to read what ``tokens`` will be asked for, and does not wait.
    # ``tokenizer_path`` and ``tokenizer_hash`` name the folder of the tokenizer, which is saved with checkpoints.

    def place(self, index: int) -> tuple[str, int]:
        """The file of a document, and its offset there in the file's own unit (bytes, or lines and rows)."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short hash of what is read: saved in checkpoints, compared at load."""
        ...


def prefetch(source: TokenSource, index: int, start: int, stop: int) -> None:
    """Start to read these tokens of a document, if the source can; does not wait."""
    if (begin := getattr(source, "prefetch", None)) is not None:
        begin(index, start, stop)


class InMemorySource:
    """Documents in memory, for tests and small data.

    Args:
        documents: the tokens of each.
        name: for messages.

    Raises: UsageError: no document, or one that is not a one-dimensional array of integers.
    """

    def __init__(self, documents: Sequence[ArrayLike], name: str = "memory") -> None:
        self.name = name
        self._documents = [np.asarray(document) for document in documents]
        if not self._documents:
            raise UsageError(f"{name} has no documents.", where=name, do="give at least one document.")
        for index, document in enumerate(self._documents):
            if document.ndim != 1 or not (np.issubdtype(document.dtype, np.integer) or not document.size):
                raise UsageError(
                    f"document {index} is an array of {document.dtype} of shape {document.shape}.",
                    where=name,
                    do="give the token ids of each document, one after the other.",
                )
        self._lengths = np.array([len(document) for document in self._documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        return self._documents[index][start:stop]

    def place(self, index: int) -> tuple[str, int]:
        return self.name, int(self._lengths[:index].sum())

    @property
    def fingerprint(self) -> str:
        digest = xxhash.xxh64(self._lengths.tobytes())
        for document in self._documents:
            digest.update(document.astype(np.int64).tobytes())
        return digest.hexdigest()


class TokenRange:
    """Tokens ``start`` to ``stop`` of a source, counted over all its documents, as one document.

    Args:
        joined: False: as the documents that they are of, of which the first and the last may be cut.

    Memory: 8 bytes a document of the source, on the host.
    """

    def __init__(self, source: TokenSource, start: int, stop: int, *, joined: bool = True) -> None:
        self.name = source.name
        self._source, self._joined = source, joined
        self.tokenizer_path = getattr(source, "tokenizer_path", "")
        self.tokenizer_hash = getattr(source, "tokenizer_hash", "")
        self._ends = np.cumsum(source.lengths)
        self._bounds = np.unique(np.clip([start, stop] if joined else [start, *self._ends], start, stop))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._bounds)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        parts = self._each(self._source.tokens, index, start, stop)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def prefetch(self, index: int, start: int = 0, stop: int | None = None) -> None:
        self._each(partial(prefetch, self._source), index, start, stop)

    def _each(self, call: Callable[[int, int, int], T], index: int, start: int = 0, stop: int | None = None) -> list[T]:
        """Call with each document of the source and its tokens that are in the range."""
        begin, end = map(int, self._bounds[index : index + 2])
        start, stop, _ = slice(start, stop).indices(end - begin)
        at, last = begin + start, begin + stop
        results: list[T] = []
        while at < last:
            document = self._document_of(at)
            begin = int(self._ends[document] - self._source.lengths[document])
            results.append(call(document, at - begin, last - begin))
            at = int(self._ends[document])
        return results

    def place(self, index: int) -> tuple[str, int]:
        return self._source.place(self._document_of(int(self._bounds[index])))

    @property
    def fingerprint(self) -> str:
        bounds = f"{self._bounds[0]}:{self._bounds[-1]}"
        return f"{self._source.fingerprint} {bounds}" + ("" if self._joined else " documents")

    def _document_of(self, token: int) -> int:
        return int(np.searchsorted(self._ends, token, side="right"))
