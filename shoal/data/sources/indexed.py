"""Megatron's indexed datasets: ``PREFIX.idx`` says where documents are in ``PREFIX.bin``, which is memory-mapped.

    "MMIDIDX\\0\\0"  uint64 version 1  uint8 dtype  uint64 sequences  uint64 documents + 1
    int32 [sequences]        tokens of each sequence
    int64 [sequences]        byte in .bin where it begins
    int64 [documents + 1]    first sequence of each document, and the end
    int8  [sequences]        modes; multimodal datasets only

All numbers are little-endian. Megatron's documents have one or several sequences, those that are written here have one.
DeepSpeed's ``MMapIndexedDataset`` (``metric_files.py``) has the same index, with other codes of dtypes from 6 on.

Source: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.errors import UsageError

_MAGIC = b"MMIDIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_MOST_TOKENS = np.iinfo(np.int32).max  # of a sequence


@dataclass(frozen=True)
class DocumentIndex:
    """Where the documents are in a file of tokens."""

    dtype: str
    begins: NDArray[np.int64]  # [documents], in tokens
    lengths: NDArray[np.int64]  # [documents], in tokens
    checksum: str


def index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.idx")


def data_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bin")


class IndexColumns(NamedTuple):
    """What an .idx file says, column by column."""

    dtype: str
    sizes: NDArray[np.int64]  # [sequences], in elements
    begins: NDArray[np.int64]  # [sequences], in bytes
    first: NDArray[np.int64]  # [documents + 1]


def parse_index(content: bytes, dtypes: Mapping[int, str]) -> IndexColumns:
    """Raises: ValueError: the file is damaged; says how, after the file's name."""
    start = len(_MAGIC) + _COUNTS.size
    if not content.startswith(_MAGIC) or len(content) < start:
        raise ValueError("is not an index of Megatron's: it does not begin with MMIDIDX and its header")
    version, code, num_sequences, num_offsets = _COUNTS.unpack_from(content, len(_MAGIC))
    if version != 1 or code not in dtypes:
        raise ValueError(f"has version {version} and dtype code {code}, not version 1 and integers")
    nbytes = start + 12 * num_sequences + 8 * num_offsets
    if len(content) not in (nbytes, nbytes + num_sequences):  # with modes
        raise ValueError(f"has {len(content):,} bytes in place of {nbytes:,}")
    return IndexColumns(
        dtypes[code],
        np.frombuffer(content, "<i4", num_sequences, start).astype(np.int64),
        np.frombuffer(content, "<i8", num_sequences, start + 4 * num_sequences),
        np.frombuffer(content, "<i8", num_offsets, start + 12 * num_sequences),
    )


def index_content(dtype: np.dtype[Any], dtypes: Mapping[int, str], sizes: NDArray[Any], first: NDArray[Any]) -> bytes:
    """The .idx file of sequences that follow each other.

    Args:
        sizes: elements of each sequence, [sequences].
        first: sequence of each document, and the end, [documents + 1].
    """
    code = next(code for code, name in dtypes.items() if np.dtype(name) == dtype)
    begins = (np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize
    columns = (sizes.astype("<i4"), begins.astype("<i8"), first.astype("<i8"))
    return _MAGIC + _COUNTS.pack(1, code, len(sizes), len(first)) + b"".join(each.tobytes() for each in columns)


def write_index(path: Path, dtype: np.dtype[np.integer], sizes: NDArray[np.int64]) -> str:
    """Write the index of documents that follow each other. Returns: its checksum.

    Raises: UsageError: a document is longer than the format allows.
    """
    if sizes.max() > _MOST_TOKENS:
        raise UsageError(f"a document of {sizes.max():,} tokens, more than {_MOST_TOKENS:,}.", where=str(path))
    content = index_content(dtype, _DTYPES, sizes, np.arange(len(sizes) + 1))
    path.write_bytes(content)
    return xxhash.xxh64_hexdigest(content)


def read_index(prefix: Path, do: str) -> DocumentIndex:
    """Read an index, and compare it with the sizes of both files.

    Args:
        do: what the user does about a damaged file.

    Raises: UsageError: a file is missing, truncated, or contradicts the other; the file is named.
    """
    index, data = index_of(prefix), data_of(prefix)

    def refuse(what: str) -> UsageError:
        return UsageError(f"{what}.", where=str(prefix), do=do)

    for file in (index, data):
        if not file.is_file():
            raise refuse(f"{file} is missing")
    content = index.read_bytes()
    try:
        dtype, sizes, begins, first = parse_index(content, _DTYPES)
    except ValueError as error:
        raise refuse(f"{index} {error}") from None
    num_sequences = len(sizes)
    if len(first) < 2 or not sizes.any():
        raise refuse(f"{index} has no documents, or only empty ones")
    if first[0] != 0 or first[-1] != num_sequences or np.any(np.diff(first) < 0) or np.any(sizes < 0):
        raise refuse(f"{index} has documents that are not ranges of its {num_sequences} sequences")
    itemsize = np.dtype(dtype).itemsize
    ends = begins + sizes * itemsize
    continues = np.ones(num_sequences + 1, bool)
    continues[first] = False  # where a document begins, anywhere in the data
    if begins.min() < 0 or np.any(begins % itemsize) or np.any((begins[1:] != ends[:-1])[continues[1:-1]]):
        raise refuse(f"{index} has a document whose sequences are not adjacent in the data")
    if ends.max() > data.stat().st_size:
        raise refuse(f"{data} has {data.stat().st_size:,} bytes, and its index names {ends.max():,}")
    return DocumentIndex(
        dtype=dtype,
        begins=np.append(begins, 0)[first[:-1]] // itemsize,
        lengths=np.diff(np.append(0, np.cumsum(sizes))[first]),
        checksum=xxhash.xxh64_hexdigest(content),
    )


class MappedArray:
    """The first ``num`` elements of a file, at least one, read-only.

    A page fault alone makes the system read ahead. A part is therefore asked for before it is touched: 300 samples of
    8 KiB at random places of a file that is not in memory read 12 KiB each from an ext4 disk, in place of 1,275 KiB.
    """

    def __init__(self, path: Path, dtype: str, num: int) -> None:
        with open(path, "rb") as file:
            self._mapping = mmap.mmap(file.fileno(), num * np.dtype(dtype).itemsize, access=mmap.ACCESS_READ)
        self.array: NDArray[Any] = np.frombuffer(self._mapping, dtype)

    def part(self, begin: int, end: int) -> NDArray[Any]:
        """Elements ``begin`` to ``end``; the pages that they are in are read, and no others."""
        self.prefetch(begin, end)
        return self.array[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        """Let the system read these pages, without waiting for it."""
        if begin < end:
            first, last = begin * self.array.itemsize, end * self.array.itemsize
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_WILLNEED, page, last - page)
