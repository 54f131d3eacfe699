"""Token files: a folder that is memory-mapped, so that a part of a document is read without the rest.

    header.json      dtype, numbers, the tokenizer's name and hash, the largest token
    documents.bin    int64 [documents + 1]: where each document begins, in tokens, and the end
    tokens.bin       dtype [tokens]: all documents, one after the other
    checksums.bin    uint64 [chunks]: xxh64 of every MiB of tokens.bin
    tokenizer/       the tokenizer's files, where it has any

All numbers are little-endian. The same documents give the same bytes. A folder is written under a temporary name,
flushed, and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from shoal.data.sources.mapped import MappedArray
from shoal.data.tokenizers import Tokenizer
from shoal.errors import UsageError

HEADER = "header.json"
_DOCUMENTS, _TOKENS, _CHECKSUMS, _TOKENIZER = "documents.bin", "tokens.bin", "checksums.bin", "tokenizer"
_CHUNK_NBYTES = 1 << 20
_NUM_SAMPLED = 8  # chunks that opening a file verifies, the first and the last among them
_REPAIR = "copy the whole folder again from where it was built, or build it again with shoal data build --overwrite."


class TokenFileHeader(BaseModel):
    """The contents of header.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["shoal-tokens"] = "shoal-tokens"
    version: Literal[1] = 1
    dtype: Literal["<u1", "<u2", "<i4"]
    num_documents: PositiveInt
    num_tokens: PositiveInt
    largest_token: NonNegativeInt
    vocab_size: PositiveInt
    end_of_text: int | None
    tokenizer: str  # its name; empty where the tokens came without one
    tokenizer_hash: str
    documents_checksum: str
    checksums_checksum: str


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype of a token file that represents a vocabulary."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<i4")


def sampled_chunks(num_chunks: int) -> list[int]:
    """Some chunks of a file, spread evenly: the first and the last among them."""
    return sorted({int(at) for at in np.linspace(0, num_chunks - 1, min(num_chunks, _NUM_SAMPLED))})


def temporary_name(path: Path) -> Path:
    """A name in the same folder, from which a rename to ``path`` is atomic."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def flush(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_tokens(
    tokens: NDArray[Any], lengths: NDArray[np.int64], vocab_size: int, where: str, first_document: int
) -> None:
    """Raises: UsageError: a token that is not in the vocabulary; documents that are not all of the tokens."""
    if lengths.sum() != len(tokens):
        raise UsageError(f"{len(tokens)} tokens for documents of {lengths.sum()}.", where=where)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        document = first_document + int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise UsageError(
            f"token {tokens[wrong[0]]} in document {document} is outside of the vocabulary, 0 to {vocab_size - 1}.",
            where=where,
            do="use the tokenizer that the tokens were made with, or give its vocabulary size.",
        )


class TokenFileWriter:
    """Writes a token file; ``with`` makes it appear at the end, or removes it at an exception.

    Args:
        path: the folder to make.
        tokenizer: what the tokens were made by. Its files are copied into the folder.
        vocab_size: in place of a tokenizer.
        overwrite: replace what is at ``path``.

    Raises: UsageError: something is at ``path``; a token outside of the vocabulary; no documents.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        overwrite: bool = False,
    ) -> None:
        if vocab_size is None and tokenizer is None:
            raise UsageError("neither a tokenizer nor a vocabulary size.", where=str(path), do="give one of the two.")
        self.path = Path(path)
        if self.path.exists() and not overwrite:
            raise UsageError(f"{path} exists.", where="TokenFileWriter", do="choose another path, or overwrite it.")
        self._tokenizer = tokenizer
        self._vocab_size: int = vocab_size or tokenizer.vocab_size  # type: ignore[union-attr]  # one is given
        self._dtype = token_dtype(self._vocab_size)
        self._folder = temporary_name(self.path)
        self._checksums: list[int] = []
        self._chunk = xxhash.xxh64()
        self._chunk_nbytes = 0
        self._documents_digest = xxhash.xxh64()
        self.num_documents = 0
        self.num_tokens = 0
        self._largest = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._tokens = open(self._folder / _TOKENS, "xb")
        self._documents = open(self._folder / _DOCUMENTS, "xb")
        self._add_offsets(np.zeros(1, np.int64))
        return self

    def write(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append documents.

        Args:
            tokens: [tokens] of one or several documents, one after the other.
            lengths: tokens of each document, [documents]; None: it is one document.
        """
        values = np.asarray(tokens)
        sizes = np.array([len(values)] if lengths is None else lengths, dtype=np.int64)
        check_tokens(values, sizes, self._vocab_size, str(self.path), self.num_documents)
        self._add_offsets(self.num_tokens + np.cumsum(sizes))
        self.num_documents += len(sizes)
        self.num_tokens += len(values)
        if len(values):
            self._largest = max(self._largest, int(values.max()))
            self._add_bytes(np.ascontiguousarray(values, dtype=self._dtype).data.cast("B"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._documents.close()
        try:
            if error is None:
                self._commit()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _add_offsets(self, offsets: NDArray[np.int64]) -> None:
        data = offsets.astype("<i8").tobytes()
        self._documents_digest.update(data)
        self._documents.write(data)

    def _add_bytes(self, data: memoryview) -> None:
        while data:
            part, data = data[: _CHUNK_NBYTES - self._chunk_nbytes], data[_CHUNK_NBYTES - self._chunk_nbytes :]
            self._tokens.write(part)
            self._chunk.update(part)
            self._chunk_nbytes += len(part)
            if self._chunk_nbytes == _CHUNK_NBYTES:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._checksums.append(self._chunk.intdigest())
        self._chunk, self._chunk_nbytes = xxhash.xxh64(), 0

    def _commit(self) -> None:
        if not self.num_tokens:
            raise UsageError("no documents, or all of them empty.", where=str(self.path), do="check the sources.")
        if self._chunk_nbytes:
            self._end_chunk()
        checksums = np.array(self._checksums, dtype="<u8").tobytes()
        (self._folder / _CHECKSUMS).write_bytes(checksums)
        if self._tokenizer is not None:
            self._tokenizer.save(self._folder / _TOKENIZER)
        header = TokenFileHeader(
            dtype=self._dtype.newbyteorder("<").str.replace("|", "<"),  # type: ignore[arg-type]  # one of the three
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            largest_token=self._largest,
            vocab_size=self._vocab_size,
            end_of_text=None if self._tokenizer is None else self._tokenizer.end_of_text,
            tokenizer="" if self._tokenizer is None else self._tokenizer.name,
            tokenizer_hash="" if self._tokenizer is None else self._tokenizer.fingerprint,
            documents_checksum=self._documents_digest.hexdigest(),
            checksums_checksum=xxhash.xxh64_hexdigest(checksums),
        )
        (self._folder / HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for path in sorted(self._folder.rglob("*"), reverse=True):
            flush(path)
        flush(self._folder)
        if self.path.exists():
            old = temporary_name(self.path)
            self.path.rename(old)
            self._folder.rename(self.path)
            shutil.rmtree(old)
        else:
            self._folder.rename(self.path)
        flush(self.path.parent)


class TokenFile:
    """Documents in a folder that ``TokenFileWriter`` or ``shoal data build`` wrote.

    Opening compares the sizes of the files with the header, and verifies the offsets of all documents and 8 chunks of
    tokens.

    Args:
        verify: verify every chunk: the whole file is read.

    Raises: UsageError: there is no token file, or it is damaged; the file and its chunks are named.
    """

    def __init__(self, path: str | Path, *, verify: bool = False) -> None:
        self.path = Path(path)
        self.name = str(path)
        try:
            self.header = TokenFileHeader.model_validate_json((self.path / HEADER).read_bytes())
        except OSError as error:
            raise UsageError(
                f"no token file at {path}: {error}.",
                where=self.name,
                do="name a folder that shoal data build has made.",
            ) from error
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise UsageError(f"{self.path / HEADER} is damaged: {faults}.", where=self.name, do=_REPAIR) from error
        self._offsets = self._map(_DOCUMENTS, "<i8", self.header.num_documents + 1).array
        self._mapped = self._map(_TOKENS, self.header.dtype, self.header.num_tokens)
        self._tokens = self._mapped.array
        self.num_chunks = -(-self._tokens.nbytes // _CHUNK_NBYTES)
        self._checksums = self._map(_CHECKSUMS, "<u8", self.num_chunks).array
        for file, array, checksum in (
            (_DOCUMENTS, self._offsets, self.header.documents_checksum),
            (_CHECKSUMS, self._checksums, self.header.checksums_checksum),
        ):
            if xxhash.xxh64_hexdigest(array.data) != checksum:
                raise UsageError(f"{self.path / file} has changed: its checksum differs.", where=self.name, do=_REPAIR)
        self.check(range(self.num_chunks) if verify else sampled_chunks(self.num_chunks))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path,)  # the mapping would be copied into another process as data

    def __len__(self) -> int:
        return self.header.num_documents

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._offsets).astype(np.int64, copy=False)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        begin, end = self._offsets[index : index + 2].tolist()
        start, stop, _ = slice(start, stop).indices(end - begin)
        return self._mapped.part(begin + start, begin + max(start, stop))

    def place(self, index: int) -> tuple[str, int]:
        return str(self.path / _TOKENS), int(self._offsets[index]) * self._tokens.itemsize

    @property
    def fingerprint(self) -> str:
        header = self.header
        parts = f"{header.dtype} {header.documents_checksum} {header.checksums_checksum}"
        return xxhash.xxh64_hexdigest(parts.encode())

    @property
    def largest_token(self) -> int:
        return self.header.largest_token

    @property
    def tokenizer_hash(self) -> str:
        return self.header.tokenizer_hash

    @property
    def tokenizer_path(self) -> str:
        """What ``load_tokenizer`` reads the tokenizer from; empty where the tokens came without one."""
        folder = self.path / _TOKENIZER
        return str(folder) if folder.is_dir() else self.header.tokenizer

    def check(self, chunks: Iterable[int]) -> None:
        """Compare chunks of the tokens with their checksums.

        Raises: UsageError: chunks that have changed, by number and bytes.
        """
        damaged = [chunk for chunk in chunks if self._checksum(chunk) != int(self._checksums[chunk])]
        if damaged:
            places = ", ".join(
                f"{chunk} (bytes {chunk * _CHUNK_NBYTES:,} to"
                f" {min((chunk + 1) * _CHUNK_NBYTES, self._tokens.nbytes):,})"
                for chunk in damaged[:8]
            )
            more = f" and {len(damaged) - 8} more" if len(damaged) > 8 else ""
            raise UsageError(
                f"{self.path / _TOKENS} has changed in {'chunk' if len(damaged) == 1 else 'chunks'} {places}{more}.",
                where=self.name,
                do=_REPAIR,
            )

    def _checksum(self, chunk: int) -> int:
        num = _CHUNK_NBYTES // self._tokens.itemsize
        return xxhash.xxh64_intdigest(self._mapped.part(chunk * num, min((chunk + 1) * num, len(self._tokens))).data)

    def _map(self, name: str, dtype: str, num: int) -> MappedArray:
        path, nbytes = self.path / name, num * np.dtype(dtype).itemsize
        actual = path.stat().st_size if path.is_file() else None
        if actual != nbytes:
            state = "is missing" if actual is None else f"has {actual:,} bytes in place of {nbytes:,}"
            raise UsageError(f"{path} {state}.", where=self.name, do=_REPAIR)
        return MappedArray(path, dtype, num)
