"""Files of an analysis: rows of integers of unequal lengths, memory-mapped (DeepSpeed's ``MMapIndexedDataset``).

PATH.idx   magic, version 1, dtype code, rows, documents; lengths int32, byte offsets int64, documents int64
PATH.bin   the rows, back to back
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import UsageError

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<QBQQ")
# DeepSpeed's codes; Megatron's differ from 6 on.
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "u2", 7: "u4", 8: "u8"}


class Rows(Sequence[np.ndarray]):
    """The rows of a file, by number, read when they are asked for.

    Raises: UsageError: there is no such file, or it is none of this kind, or it is cut off.
    """

    def __init__(self, path: str | Path, where: str = "") -> None:
        index, data = Path(f"{path}.idx"), Path(f"{path}.bin")
        if not index.is_file() or not data.is_file():
            missing = index if not index.is_file() else data
            do = "name it without suffix, as `shoal data analyse` or DeepSpeed's DataAnalyzer has written it."
            raise UsageError(f"there is no file {missing}.", where=where, do=do, code="metric-file")
        content = index.read_bytes()
        start = len(_MAGIC) + _HEADER.size
        if not content.startswith(_MAGIC) or len(content) < start:
            raise self._damaged(index, "does not begin as such a file does", where)
        version, code, num_rows, num_documents = _HEADER.unpack_from(content, len(_MAGIC))
        if version != 1 or code not in _DTYPES:
            raise self._damaged(index, f"has version {version} and dtype code {code}", where)
        if len(content) != start + 12 * num_rows + 8 * num_documents:
            raise self._damaged(index, f"has {len(content)} bytes for {num_rows} rows", where)
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        lengths = np.frombuffer(content, "<i4", num_rows, start).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        if data.stat().st_size != self._starts[-1] * dtype.itemsize:
            raise self._damaged(data, f"has {data.stat().st_size} bytes for {self._starts[-1]} numbers", where)
        self._values = np.memmap(data, dtype, "r") if self._starts[-1] else np.empty(0, dtype)

    @staticmethod
    def _damaged(path: Path, what: str, where: str) -> UsageError:
        return UsageError(f"{path} {what}.", where=where, do="analyse the data again.", code="metric-file")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: Any) -> Any:
        """Raises: IndexError: there is no such row."""
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return np.asarray(self._values[self._starts[row] : self._starts[row + 1]])

    def together(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``first`` to ``stop``, back to back."""
        return np.asarray(self._values[self._starts[first] : self._starts[len(self) if stop is None else stop]])

    @property
    def lengths(self) -> np.ndarray:
        """Of each row, int64."""
        return np.diff(self._starts)


def write_rows(path: str | Path, values: np.ndarray, lengths: np.ndarray, dtype: Any) -> None:
    """Write rows of integers to ``PATH.bin`` and ``PATH.idx``, which appear when they are complete.

    Args:
        values: of all rows, back to back.
        lengths: of each row.
    """
    dtype = np.dtype(dtype)
    data, index = Path(f"{path}.bin"), Path(f"{path}.idx")
    data.parent.mkdir(parents=True, exist_ok=True)
    code = next(number for number, name in _DTYPES.items() if np.dtype(name) == dtype)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    header = _MAGIC + _HEADER.pack(1, code, len(lengths), 2)
    documents = np.array([0, len(lengths)], "<i8")
    parts = Path(f"{data}.part"), Path(f"{index}.part")
    parts[0].write_bytes(np.ascontiguousarray(values, dtype.newbyteorder("<")).tobytes())
    parts[1].write_bytes(
        b"".join(
            [header, *(np.asarray(a, d).tobytes() for a, d in ((lengths, "<i4"), (starts, "<i8"))), documents.tobytes()]
        )
    )
    for part, path_ in zip(parts, (data, index), strict=True):
        part.replace(path_)


def smallest_dtype(low: int, high: int) -> np.dtype[Any]:
    """The smallest integer dtype that holds both; unsigned where ``low`` is not negative."""
    kinds = ("u1", "u2", "u4", "u8") if low >= 0 else ("i1", "i2", "i4", "i8")
    return next(dtype for kind in kinds if np.iinfo(dtype := np.dtype(kind)).min <= low and high <= np.iinfo(dtype).max)
