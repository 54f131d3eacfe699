"""Files of tokens, memory-mapped, so that a part of a document is read without the rest.

    header.json      the tokenizer's name and hash, the largest token, checksums of the index and of checksums.bin
    tokens.bin       all documents, one after the other; little-endian
    tokens.idx       where they are, as Megatron writes it (``indexed.py``): Megatron reads PATH/tokens as its own
    checksums.bin    uint64 [chunks]: xxh64 of every MiB of tokens.bin
    tokenizer/       the tokenizer's files, where it has any

The same documents give the same bytes. A folder is written under a temporary name, flushed, and renamed, so it is there
whole or not at all.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from shoal.data.sources.indexed import MappedArray, data_of, index_of, read_index, write_index
from shoal.data.tokenizers import Tokenizer
from shoal.errors import UsageError

_HEADER, _PREFIX, _CHECKSUMS, _TOKENIZER = "header.json", "tokens", "checksums.bin", "tokenizer"
_CHUNK_NBYTES = 1 << 20
_NUM_SAMPLED = 8  # chunks that opening a file verifies, the first and the last among them
_ABANDONED_SECONDS = 10.0  # since the last write, from which on a writer without a lock is dead
_REPAIR = "name a whole file of tokens: copy it again, or build it with shoal data build (--overwrite)."


class TokenFileHeader(BaseModel):
    """The contents of header.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["shoal-tokens"] = "shoal-tokens"
    version: Literal[1] = 1
    num_tokens: PositiveInt
    largest_token: NonNegativeInt
    vocab_size: PositiveInt
    end_of_text: int | None
    tokenizer: str  # its name; empty where the tokens came without one
    tokenizer_hash: str
    index_checksum: str
    checksums_checksum: str


class TokenFileWriter:
    """Writes a file of tokens; ``with`` makes it appear at the end, or removes it at an exception.

    Args:
        path: the folder to make.
        tokenizer: what the tokens were made by. Its files are copied into the folder.
        vocab_size: in place of a tokenizer. It decides the dtype: 8 bits up to 256 tokens, 16 up to 65,536, else 32.
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
        self.dtype = np.dtype("<u1" if self._vocab_size <= 2**8 else "<u2" if self._vocab_size <= 2**16 else "<i4")
        self._folder = self._temporary_name()
        self._kept: tuple[Path, int] | None = None  # and the descriptor of its lock
        self._continued: Path | None = None  # the file there that has the tokens
        self._lengths: list[NDArray[np.int64]] = []
        self._checksums: list[int] = []
        self._chunk = xxhash.xxh64()
        self._chunk_nbytes = 0
        self.num_documents = 0
        self.num_tokens = 0
        self._largest = 0

    def __enter__(self) -> Self:
        self._remove_abandoned()
        self._folder.mkdir(parents=True)
        self._data = open(data_of(self._folder / _PREFIX), "xb")
        fcntl.flock(self._data, fcntl.LOCK_EX)  # until this process is done, or dies
        self._out: IO[bytes] = self._data
        return self

    def write(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append documents.

        Args:
            tokens: [tokens] of one or several documents, one after the other.
            lengths: tokens of each document, [documents]; None: it is one document.
        """
        values = np.asarray(tokens)
        sizes = np.array([len(values)] if lengths is None else lengths, dtype=np.int64)
        if sizes.sum() != len(values):
            raise UsageError(f"{len(values)} tokens for documents of {sizes.sum()}.", where=str(self.path))
        wrong = np.flatnonzero((values < 0) | (values >= self._vocab_size))
        if len(wrong):
            document = self.num_documents + int(np.searchsorted(np.cumsum(sizes), wrong[0], side="right"))
            raise UsageError(
                f"token {values[wrong[0]]} in document {document} is outside of the vocabulary,"
                f" 0 to {self._vocab_size - 1}.",
                where=str(self.path),
                do="use the tokenizer that the tokens were made with, or give its vocabulary size.",
            )
        self._lengths.append(sizes)
        self.num_documents += len(sizes)
        self.num_tokens += len(values)
        if len(values):
            self._largest = max(self._largest, int(values.max()))
            self._add_bytes(np.ascontiguousarray(values, dtype=self.dtype).data.cast("B"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_done = False
        try:
            self._out.flush()
            if error is None:
                self._commit()
                is_done = True
        finally:
            if self._kept is not None:
                has_tokens = any(path.stat().st_size for path in self._kept[0].glob("*.bin"))
                if is_done or not has_tokens:
                    shutil.rmtree(self._kept[0], ignore_errors=True)
            self._data.close()
            self._out.close()
            if self._kept is not None:
                os.close(self._kept[1])
            shutil.rmtree(self._folder, ignore_errors=True)

    def kept_folder(self) -> Path | None:
        """A folder for what the next writer of this path needs if this one ends too early. The end removes it.

        Returns: None: another process has it, or this writer has one, or has written tokens.
        """
        if self._kept is not None or self.num_documents:
            return None
        folder = self.path.with_name(f".{self.path.name}.kept")
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = folder, os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(self._kept[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._kept[1])
            self._kept = None
            return None
        return folder

    def continue_in(self, path: Path) -> None:
        """Write the tokens to a file of ``kept_folder``, from its beginning; the end moves it. What is there is left
        until it is written over.
        """
        self._continued = path
        self._out = os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o666), "r+b")

    def flush(self) -> None:
        """Hand what was written to the system, which keeps it if this process is killed."""
        self._out.flush()

    def _remove_abandoned(self) -> None:
        """Remove what writers of this path left behind that were killed: no process holds the lock of their data."""
        for folder in self.path.parent.glob(f".{glob.escape(self.path.name)}.tmp-*"):
            with suppress(OSError), open(data_of(folder / _PREFIX), "rb") as data:
                if time.time() - os.fstat(data.fileno()).st_mtime > _ABANDONED_SECONDS:  # one that begins has no lock
                    fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)

    def _add_bytes(self, data: memoryview) -> None:
        while data:
            part, data = data[: _CHUNK_NBYTES - self._chunk_nbytes], data[_CHUNK_NBYTES - self._chunk_nbytes :]
            self._out.write(part)
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
        tokenizer = self._tokenizer
        if tokenizer is not None:
            tokenizer.save(self._folder / _TOKENIZER)
        header = TokenFileHeader(
            num_tokens=self.num_tokens,
            largest_token=self._largest,
            vocab_size=self._vocab_size,
            end_of_text=None if tokenizer is None else tokenizer.end_of_text,
            tokenizer="" if tokenizer is None else tokenizer.name,
            tokenizer_hash="" if tokenizer is None else tokenizer.fingerprint,
            index_checksum=write_index(index_of(self._folder / _PREFIX), self.dtype, np.concatenate(self._lengths)),
            checksums_checksum=xxhash.xxh64_hexdigest(checksums),
        )
        (self._folder / _HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")
        self._out.truncate(self._out.tell())
        os.fsync(self._out.fileno())
        if self._continued is not None:
            self._move_tokens(self._continued)
        for path in (*self._folder.rglob("*"), self._folder):
            _flush(path)
        old = self._temporary_name()
        if self.path.exists():
            self.path.rename(old)
        self._folder.rename(self.path)
        _flush(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _move_tokens(self, path: Path) -> None:
        try:
            path.replace(data_of(self._folder / _PREFIX))
        except FileNotFoundError:  # the user has removed the folder
            self._out.seek(0)
            with open(data_of(self._folder / _PREFIX), "wb") as file:
                shutil.copyfileobj(self._out, file)

    def _temporary_name(self) -> Path:
        """A name in the same folder, from which a rename is atomic."""
        return self.path.with_name(f".{self.path.name}.tmp-{secrets.token_hex(4)}")


def _flush(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_folder_of_tokens(path: Path) -> bool:
    """True if ``TokenFileWriter`` wrote the folder; it may be damaged."""
    return (path / _HEADER).is_file() or index_of(path / _PREFIX).is_file()


class TokenFile:
    """Documents in a folder that ``TokenFileWriter`` or ``shoal data build`` wrote, or in an .idx and a .bin file.

    Opening reads the index and compares it with the sizes of the files. In a folder it verifies checksums, of the index
    and of 8 chunks of the tokens. Megatron's files have none: changed tokens only change the fingerprint.

    Args:
        path: the folder; or the prefix of both files of Megatron's, or one of them.
        verify: read the whole file: verify every chunk, or that no token is negative.

    Raises: UsageError: there is no such file, or it is damaged; the file and its chunks are named.
    """

    def __init__(self, path: str | Path, *, verify: bool = False) -> None:
        self.path = Path(path)
        self.name = str(path)
        self.header = self._read_header() if is_folder_of_tokens(self.path) else None
        prefix = self.path.with_suffix("") if self.path.suffix in (".idx", ".bin") else self.path
        prefix = prefix if self.header is None else self.path / _PREFIX
        self._index = read_index(prefix, _REPAIR)
        self._file = data_of(prefix)
        nbytes = self._file.stat().st_size
        self._mapped = MappedArray(self._file, self._index.dtype, nbytes // np.dtype(self._index.dtype).itemsize)
        self._tokens = self._mapped.array
        self.num_chunks = -(-self._tokens.nbytes // _CHUNK_NBYTES)
        chunks = range(self.num_chunks)
        self._sampled = sorted({int(at) for at in np.linspace(0, self.num_chunks - 1, _NUM_SAMPLED)})
        if self.header is not None:
            self._checksums = self._read_checksums(self.header)
            self.check(chunks if verify else self._sampled)
        elif verify and self._tokens.min() < 0:
            raise UsageError(f"{self._file} has the token {self._tokens.min()}.", where=self.name, do=_REPAIR)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path,)  # another process maps the file again

    def __len__(self) -> int:
        return len(self._index.lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._index.lengths

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        return self._mapped.part(*self._range(index, start, stop))

    def prefetch(self, index: int, start: int = 0, stop: int | None = None) -> None:
        """Let the system read what ``tokens`` will ask for, without waiting for it."""
        self._mapped.prefetch(*self._range(index, start, stop))

    def _range(self, index: int, start: int, stop: int | None) -> tuple[int, int]:
        begin = int(self._index.begins[index])
        start, stop, _ = slice(start, stop).indices(int(self.lengths[index]))
        return begin + start, begin + max(start, stop)

    def place(self, index: int) -> tuple[str, int]:
        return str(self._file), int(self._index.begins[index]) * self._tokens.itemsize

    @cached_property
    def fingerprint(self) -> str:
        digest = xxhash.xxh64(f"{self._index.checksum} {self._tokens.nbytes}".encode())
        for chunk in self._sampled:
            digest.update(self._chunk(chunk).data)
        if self.header is not None:
            digest.update(self.header.checksums_checksum.encode())
        return digest.hexdigest()

    @cached_property
    def largest_token(self) -> int:
        """Reads the whole file where there is no header."""
        return int(self._tokens.max()) if self.header is None else self.header.largest_token

    @property
    def tokenizer_hash(self) -> str:
        return "" if self.header is None else self.header.tokenizer_hash

    @property
    def tokenizer_path(self) -> str:
        """What ``load_tokenizer`` reads the tokenizer from; empty where the tokens came without one."""
        folder = self.path / _TOKENIZER
        return str(folder) if folder.is_dir() else "" if self.header is None else self.header.tokenizer

    def check(self, chunks: Iterable[int]) -> None:
        """Compare chunks of the tokens with their checksums.

        Raises: UsageError: chunks that have changed, by number and bytes.
        """
        damaged = [
            chunk for chunk in chunks if xxhash.xxh64_intdigest(self._chunk(chunk).data) != self._checksums[chunk]
        ]
        if damaged:
            ranges = (
                (at, at * _CHUNK_NBYTES, min((at + 1) * _CHUNK_NBYTES, self._tokens.nbytes)) for at in damaged[:8]
            )
            places = ", ".join(f"{chunk} (bytes {first:,} to {last:,})" for chunk, first, last in ranges)
            more = f" and {len(damaged) - 8} more" if len(damaged) > 8 else ""
            raise UsageError(
                f"{self._file} has changed in {'chunk' if len(damaged) == 1 else 'chunks'} {places}{more}.",
                where=self.name,
                do=_REPAIR,
            )

    def _chunk(self, chunk: int) -> NDArray[Any]:
        num = _CHUNK_NBYTES // self._tokens.itemsize
        return self._mapped.part(chunk * num, min((chunk + 1) * num, len(self._tokens)))

    def _read_header(self) -> TokenFileHeader:
        if not (self.path / _HEADER).is_file():
            raise UsageError(f"{self.path / _HEADER} is missing.", where=self.name, do=_REPAIR)
        try:
            return TokenFileHeader.model_validate_json((self.path / _HEADER).read_bytes())
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise UsageError(f"{self.path / _HEADER} is damaged: {faults}.", where=self.name, do=_REPAIR) from error

    def _read_checksums(self, header: TokenFileHeader) -> list[int]:
        """Of the chunks. Raises: UsageError: a file is not the one that the header is of."""
        path = self.path / _CHECKSUMS
        content = path.read_bytes() if path.is_file() else b""
        problem = ""
        if self._file.stat().st_size != header.num_tokens * self._tokens.itemsize:
            nbytes = header.num_tokens * self._tokens.itemsize
            problem = f"{self._file} has {self._file.stat().st_size:,} bytes in place of {nbytes:,}"
        elif self._index.checksum != header.index_checksum:
            problem = f"{self.path / _PREFIX}.idx has changed: its checksum differs"
        elif xxhash.xxh64_hexdigest(content) != header.checksums_checksum:
            problem = f"{path} {'has changed: its checksum differs' if content else 'is missing or empty'}"
        if problem:
            raise UsageError(f"{problem}.", where=self.name, do=_REPAIR)
        return [int(each) for each in np.frombuffer(content, "<u8")]
