"""Megatron's indexed datasets, read and written: ``PREFIX.idx`` and ``PREFIX.bin``.

    .idx   "MMIDIDX\\0\\0"  uint64 version 1  uint8 dtype  uint64 sequences  uint64 documents + 1
           int32 [sequences]        tokens of each sequence
           int64 [sequences]        byte in .bin where it begins
           int64 [documents + 1]    first sequence of each document, and the end
           int8  [sequences]        modes; multimodal data sets only
    .bin   the tokens of all sequences

All numbers are little-endian. A document here is a document there, its sequences one after the other; written documents
are one sequence each.

Source: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import struct
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from shoal.data.sources.mapped import MappedArray
from shoal.data.sources.token_file import check_tokens, flush, sampled_chunks, temporary_name
from shoal.errors import UsageError

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_FLOATS = (6, 7)
_LARGEST_16_BIT_VOCAB = 65_500  # Megatron writes 16 bits below it
_CHUNK_NBYTES = 1 << 20


def prefix_of(path: str | Path) -> Path:
    """The prefix of both files, given it or one of them."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".idx", ".bin") else path


def index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.idx")


def data_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bin")


class MegatronFile:
    """The documents of an indexed dataset, memory-mapped.

    Opening reads the index and compares it with the sizes of both files. The format has no checksums, so changed tokens
    show in the fingerprint only, of which 8 chunks of the data are a part.

    Args:
        path: the prefix, or one of the two files.

    Raises: UsageError: a file is missing, truncated, or contradicts the other; the file is named.
    """

    tokenizer_path = tokenizer_hash = ""  # which the format does not have

    def __init__(self, path: str | Path) -> None:
        self._prefix = prefix_of(path)
        self.name = str(self._prefix)
        index = index_of(self._prefix)
        if not index.is_file() or not data_of(self._prefix).is_file():
            missing = index if not index.is_file() else data_of(self._prefix)
            raise self._error(f"{missing} is missing", "name the prefix of an .idx and a .bin file.")
        content = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
        header, start = bytes(content[: len(_MAGIC) + _COUNTS.size]), len(_MAGIC) + _COUNTS.size
        if header.startswith(_OLD_MAGIC):
            raise self._error(f"{index} has the format before MMIDIDX", "convert it with Megatron's merge_datasets.py.")
        if not header.startswith(_MAGIC) or len(header) < start:
            raise self._error(f"{index} is not an index of Megatron's: it does not begin with MMIDIDX and its header")
        version, code, num_sequences, num_offsets = _COUNTS.unpack(header[len(_MAGIC) :])
        if version != 1 or code not in _DTYPES or code in _FLOATS:
            raise self._error(f"{index} has version {version} and dtype code {code}, not version 1 and integer tokens")
        nbytes = start + 12 * num_sequences + 8 * num_offsets
        if len(content) not in (nbytes, nbytes + num_sequences):  # with modes
            raise self._error(f"{index} has {len(content):,} bytes in place of {nbytes:,}")
        parts = np.split(content[start:nbytes], [4 * num_sequences, 12 * num_sequences])
        sizes, begins, first = (
            part.view(dtype).astype(np.int64) for part, dtype in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
        )
        dtype, data = np.dtype(_DTYPES[code]), data_of(self._prefix)
        self._check(sizes, begins, first, dtype.itemsize)
        self._mapped = MappedArray(data, _DTYPES[code], data.stat().st_size // dtype.itemsize)
        self._tokens = self._mapped.array
        self._lengths = np.diff(np.append(0, np.cumsum(sizes))[first])
        self._begins = np.append(begins, 0)[first[:-1]] // dtype.itemsize
        self._index_checksum = xxhash.xxh64_hexdigest(content.data)

    def _check(
        self, sizes: NDArray[np.int64], begins: NDArray[np.int64], first: NDArray[np.int64], itemsize: int
    ) -> None:
        """Raises: UsageError: the arrays of the index contradict each other, or the data's size."""
        index, data = index_of(self._prefix), data_of(self._prefix)
        if len(first) < 2 or not sizes.any():
            raise self._error(f"{index} has no documents, or only empty ones")
        if first[0] != 0 or first[-1] != len(sizes) or np.any(np.diff(first) < 0) or np.any(sizes < 0):
            raise self._error(f"{index} has documents that are not ranges of its {len(sizes)} sequences")
        ends = begins + sizes * itemsize
        continues = np.ones(len(sizes) + 1, bool)
        continues[first] = False  # where a document begins, anywhere in the data
        if begins.min() < 0 or np.any(begins % itemsize) or np.any((begins[1:] != ends[:-1])[continues[1:-1]]):
            raise self._error(f"{index} has a document whose sequences are not adjacent in the data")
        if ends.max() > data.stat().st_size:
            raise self._error(f"{data} has {data.stat().st_size:,} bytes, and its index names {ends.max():,}")

    def _error(self, what: str, do: str = "copy both files again, or make them again.") -> UsageError:
        return UsageError(f"{what}.", where=self.name, do=do)

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronFile, (self._prefix,)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        begin = int(self._begins[index])
        start, stop, _ = slice(start, stop).indices(int(self._lengths[index]))
        return self._mapped.part(begin + start, begin + max(start, stop))

    def place(self, index: int) -> tuple[str, int]:
        return str(data_of(self._prefix)), int(self._begins[index]) * self._tokens.itemsize

    @property
    def fingerprint(self) -> str:
        digest = xxhash.xxh64(f"{self._index_checksum} {self._tokens.nbytes}".encode())
        num = _CHUNK_NBYTES // self._tokens.itemsize
        for chunk in sampled_chunks(-(-len(self._tokens) // num)):
            digest.update(self._mapped.part(chunk * num, min((chunk + 1) * num, len(self._tokens))).data)
        return digest.hexdigest()

    @cached_property
    def largest_token(self) -> int:
        """Reads the whole file. Raises: UsageError: a token is negative."""
        if self._tokens.min() < 0:
            raise self._error(f"{data_of(self._prefix)} has the token {self._tokens.min()}")
        return int(self._tokens.max())


class MegatronWriter:
    """Writes an indexed dataset; ``with`` makes both files appear at the end, or removes them at an exception.

    Args:
        path: the prefix, or one of the two files.
        vocab_size: of the tokens: 16 bits below 65,500, as Megatron does, else 32.
        overwrite: replace what is there.

    Raises: UsageError: a file is there; a token outside of the vocabulary; no documents.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, overwrite: bool = False) -> None:
        self.path = prefix_of(path)
        self._files = data_of(self.path), index_of(self.path)
        there = [str(file) for file in self._files if file.exists()]
        if there and not overwrite:
            raise UsageError(f"{there[0]} exists.", where="MegatronWriter", do="choose another path, or overwrite it.")
        self._vocab_size = vocab_size
        self._code = 8 if vocab_size < _LARGEST_16_BIT_VOCAB else 4
        self._temporary = tuple(temporary_name(file) for file in self._files)
        self._sizes: list[NDArray[np.int64]] = []
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._data = open(self._temporary[0], "xb")
        return self

    def write(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Append documents, as ``TokenFileWriter.write`` does."""
        values = np.asarray(tokens)
        sizes = np.array([len(values)] if lengths is None else lengths, dtype=np.int64)
        check_tokens(values, sizes, self._vocab_size, str(self.path), self.num_documents)
        self._data.write(values.astype(_DTYPES[self._code]).data)
        self._sizes.append(sizes)
        self.num_documents += len(sizes)
        self.num_tokens += len(values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()
        try:
            if error is None:
                self._commit()
        finally:
            for file in self._temporary:
                file.unlink(missing_ok=True)

    def _commit(self) -> None:
        if not self.num_tokens:
            raise UsageError("no documents, or all of them empty.", where=str(self.path), do="check the sources.")
        sizes = np.concatenate(self._sizes)
        if sizes.max() > np.iinfo(np.int32).max:
            raise UsageError(f"a document of {sizes.max():,} tokens, more than the format has.", where=str(self.path))
        begins = (np.cumsum(sizes) - sizes) * np.dtype(_DTYPES[self._code]).itemsize
        with open(self._temporary[1], "xb") as index:
            index.write(_MAGIC + _COUNTS.pack(1, self._code, len(sizes), len(sizes) + 1))
            index.write(sizes.astype("<i4").data)
            index.write(begins.astype("<i8").data)
            index.write(np.arange(len(sizes) + 1, dtype="<i8").data)
        for file in self._temporary:
            flush(file)
        self._files[1].unlink(missing_ok=True)  # without its index the data is no data set
        for temporary, file in zip(self._temporary, self._files, strict=True):
            temporary.rename(file)
        flush(self.path.parent)
