"""Files of an analysis: rows of integers of unequal lengths, memory-mapped (DeepSpeed's ``MMapIndexedDataset``).

PATH.idx   where each row is: Megatron's index (``sources/indexed.py``), with DeepSpeed's codes of dtypes
PATH.bin   the rows, back to back
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.sources.indexed import index_content, parse_index
from shoal.errors import UsageError

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
        try:
            columns = parse_index(index.read_bytes(), _DTYPES)
        except ValueError as error:
            raise self._damaged(index, str(error), where) from None
        dtype = np.dtype(columns.dtype).newbyteorder("<")
        self._starts = np.concatenate([[0], np.cumsum(columns.sizes)])
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
    parts = Path(f"{data}.part"), Path(f"{index}.part")
    parts[0].write_bytes(np.ascontiguousarray(values, dtype.newbyteorder("<")).tobytes())
    parts[1].write_bytes(index_content(dtype, _DTYPES, np.asarray(lengths), np.array([0, len(lengths)])))
    for part, path_ in zip(parts, (data, index), strict=True):
        part.replace(path_)


def smallest_dtype(low: int, high: int) -> np.dtype[Any]:
    """The smallest integer dtype that holds both; unsigned where ``low`` is not negative."""
    kinds = ("u1", "u2", "u4", "u8") if low >= 0 else ("i1", "i2", "i4", "i8")
    return next(dtype for kind in kinds if np.iinfo(dtype := np.dtype(kind)).min <= low and high <= np.iinfo(dtype).max)
