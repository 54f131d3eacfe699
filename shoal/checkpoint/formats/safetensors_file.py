"""Reads the safetensors format from any storage: the header that says where each tensor lies, then ranges of its bytes.

    8 bytes  length of the header
    header   JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
    data     each tensor's bytes, row by row, without a gap

A header is not trusted: each offset in it is checked against the file's size before memory is allocated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.problems import damaged_copy
from shoal.checkpoint.storage import Reader
from shoal.checkpoint.tree import SAFETENSORS_DTYPES
from shoal.errors import CheckpointError

MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors library, too
_MAX_DIMS = 64
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the file's beginning

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What one file holds."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(file: Reader, where: str) -> Header:
    """Read and check a file's header.

    Raises: CheckpointError: it is no safetensors file, is cut off, or its header says what cannot be.
    """
    if file.nbytes < 8:
        raise _damaged(where, f"it has {file.nbytes} bytes")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_NBYTES, file.nbytes - 8):
        raise _damaged(where, f"its header would have {length} bytes, and the file has {file.nbytes}")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    try:
        table = json.loads(bytes(text), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"its header is not the JSON of this format ({error})") from error
    if not isinstance(table, dict):
        raise _damaged(where, "its header is no table of tensors")
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(where, "its metadata is not text by name")
    return Header(_places(table, 8 + length, file.nbytes, where), metadata)


def _places(table: dict[str, Any], data: int, nbytes: int, where: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in table.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise _damaged(where, f"what it says of {name[:200]!r} is not a dtype, a shape and offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{name[:200]!r} has dtype {str(dtype)[:50]!r}, and Shoal reads {', '.join(SAFETENSORS_DTYPES)}.",
                where=where,
                code="checkpoint-format",
            )
        if not _are_counts(shape) or len(shape) > _MAX_DIMS or not _are_counts(offsets) or len(offsets) != 2:
            raise _damaged(where, f"shape or offsets of {name[:200]!r} are not counts")
        stored = StoredTensor(SAFETENSORS_DTYPES[dtype], tuple(shape), data + offsets[0])
        if offsets[1] - offsets[0] != stored.numel * stored.dtype.itemsize:
            raise _damaged(where, f"{name[:200]!r} of shape {shape} and dtype {dtype} has offsets {offsets}")
        spans.append((offsets[0], offsets[1], name))
        found[name] = stored
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _damaged(where, f"{name[:200]!r} begins at byte {begin} of the data, and {position} is next")
        position = end
    if data + position != nbytes:
        raise _damaged(where, f"it has {nbytes} bytes, and its header speaks of {data + position}")
    return found


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= 2**62 for value in values)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is there twice")
    return table


def _damaged(where: str, what: str) -> CheckpointError:
    return damaged_copy(f"this is no whole safetensors file: {what}.", where)


def read_range(file: Reader, stored: StoredTensor, begin: int, end: int, where: str) -> torch.Tensor:
    """Elements ``[begin, end)`` of a flattened tensor, 1-D, on CPU.

    Raises: CheckpointError: the file cannot be read.
    """
    values = torch.empty(end - begin, dtype=stored.dtype)
    if end > begin:
        view = values.view(torch.uint8).numpy().data
        try:
            file.read_into(stored.begin + begin * stored.dtype.itemsize, view)
        except OSError as error:
            raise _damaged(where, f"it cannot be read ({error})") from error
    return values
