"""Hugging Face's format: one or several safetensors files, and of several an index that says which tensor is where.

model.safetensors
model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json

A file has a header that says where each tensor lies, so ranges of a tensor's bytes are read from any storage:

    8 bytes  length of the header
    header   JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}
    data     each tensor's bytes, row by row, without a gap

A header is not trusted: each offset in it is checked against the file's size before memory is allocated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from shoal.checkpoint.blocks import TensorEntry, plan_file, write_file
from shoal.checkpoint.formats.target import new_folder, split
from shoal.checkpoint.formats.untrusted_files import UntrustedFolder, check_name
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import Source, TensorInfo, WeightsSource
from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.storage import Reader
from shoal.checkpoint.tree import SAFETENSORS_DTYPES
from shoal.errors import CheckpointError
from shoal.text import listed

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
    result: dict[str, StoredTensor] = {}
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
        result[name] = stored
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise _damaged(where, f"{name[:200]!r} begins at byte {begin} of the data, and {position} is next")
        position = end
    if data + position != nbytes:
        raise _damaged(where, f"it has {nbytes} bytes, and its header speaks of {data + position}")
    return result


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
    values = torch.empty(end - begin, dtype=stored.dtype, device="cpu")
    if end > begin:
        view = values.view(torch.uint8).numpy().data
        try:
            file.read_into(stored.begin + begin * stored.dtype.itemsize, view)
        except OSError as error:
            raise _damaged(where, f"it cannot be read ({error})") from error
    return values


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_INDEX_ENDING = ".safetensors.index.json"
_MAX_INDEX_NBYTES = 64 << 20
_FORMAT = {"format": "pt"}  # transformers refuses a file that does not say so
_MAX_NAMED = 5


class SafetensorsWeights:
    """The tensors of a folder of safetensors files, by name: whole, or ranges of them.

    Args:
        url: the folder, or one ``.safetensors`` file.

    Raises: CheckpointError: no such folder, a shard that the index names is missing or cut off, or a name in the index
        leads out of the folder.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        text = os.fspath(url)
        is_file = text.endswith(".safetensors")
        self._folder = UntrustedFolder(split(text)[0] if is_file else text)
        self.url = self._folder.url
        self.notes: list[str] = []
        self.num_bytes_read = 0  # of tensors
        self._open = ExitStack()
        self._opened: tuple[str, Reader] | None = None
        names, index = ([split(text)[1]], None) if is_file else self._files()
        headers: dict[str, Header] = {}
        for name in names:
            with self._folder.open(name) as file:
                headers[name] = read_header(file, f"{self.url}/{name}")
        if index is not None:
            self.file_of = self._by_index(index, headers)
        else:
            self.file_of = {name: file for file, header in headers.items() for name in header.tensors}
        self.tensors = {name: headers[file].tensors[name] for name, file in self.file_of.items()}
        self.aliases = self._aliases(headers)

    def _files(self) -> tuple[list[str], dict[str, str] | None]:
        present = self._folder.names()
        indexes = [name for name in present if name.endswith(_INDEX_ENDING)]
        files = [name for name in present if name.endswith(".safetensors")]
        if INDEX in indexes or (len(indexes) == 1 and SINGLE not in files):
            index = self._index(INDEX if INDEX in indexes else indexes[0])
            named = sorted(set(index.values()))
            missing = [name for name in named if name not in present]
            if missing:
                lost = sum(file in missing for file in index.values())
                raise CheckpointError(
                    f"{_shown(missing)} of {len(named)} files {'is' if len(missing) == 1 else 'are'} missing;"
                    f" {lost} tensors lie there.",
                    where=self.url,
                    do="copy the missing files there.",
                    code="checkpoint-missing",
                )
            return named, index
        if SINGLE in files or len(files) == 1:
            return [SINGLE if SINGLE in files else files[0]], None
        raise CheckpointError(
            f"there is no {SINGLE} and no {INDEX}; there are {len(files)} other safetensors files.",
            where=self.url,
            do="name the file itself." if files else "name the folder of a Hugging Face model.",
            code="checkpoint-format",
        )

    def _index(self, name: str) -> dict[str, str]:
        try:
            content = json.loads(self._folder.read(name, _MAX_INDEX_NBYTES))
            table = content["weight_map"]
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise TypeError("weight_map is not file names by tensor")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged_copy(f"{name} cannot be read: {type(error).__name__}: {error}.", self.url) from error
        for file in set(table.values()):
            check_name(file, f"{name} in {self.url}")
            if not file.endswith(".safetensors"):
                raise unsafe(f"{name} names {file!r}, which is no safetensors file.", self.url)
        return table

    def config(self) -> dict[str, Any]:
        """The ``config.json`` in the folder; empty: there is none. Raises: CheckpointError: it cannot be read."""
        if _CONFIG not in self._folder.names():
            return {}
        try:
            content = json.loads(self._folder.read(_CONFIG, _MAX_INDEX_NBYTES))
        except (ValueError, RecursionError) as error:
            raise damaged_copy(f"{_CONFIG} cannot be read: {type(error).__name__}: {error}.", self.url) from error
        return content if isinstance(content, dict) else {}

    def _by_index(self, index: dict[str, str], headers: Mapping[str, Header]) -> dict[str, str]:
        missing = [name for name, file in index.items() if name not in headers[file].tensors]
        if missing:
            them, there = ("they lie", "they are") if len(missing) > 1 else ("it lies", "it is")
            shown = _shown(missing)
            raise damaged_copy(f"{shown}: the index says where {them}, and {there} not there.", self.url)
        left = [name for file, header in headers.items() for name in header.tensors if index.get(name) != file]
        if left:
            self.notes.append(f"{_shown(left)}: in a file, but not in the index; left out.")
        return dict(index)

    def _aliases(self, headers: Mapping[str, Header]) -> dict[str, tuple[str, ...]]:
        """Tied weights as ``safetensors.torch.save_model`` notes them: {other name: the name that is written}."""
        result: dict[str, tuple[str, ...]] = {}
        for header in headers.values():
            for other, name in header.metadata.items():
                if name in self.tensors and other not in self.tensors:
                    result[name] = (*result.get(name, ()), other)
        return result

    def info(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(stored.dtype, stored.shape) for name, stored in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole. Raises: CheckpointError: its file cannot be read."""
        stored = self.tensors[name]
        return self.read_range(name, 0, stored.numel).view(stored.shape)

    def read_range(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of the flattened tensor, 1-D. Only their bytes are read.

        Raises: CheckpointError: the file cannot be read.
        """
        stored: StoredTensor = self.tensors[name]
        if not 0 <= begin <= end <= stored.numel:
            raise IndexError(f"elements {begin} to {end} of {name!r}, which has {stored.numel}")
        self.num_bytes_read += (end - begin) * stored.dtype.itemsize
        file = self.file_of[name]
        return read_range(self._reader(file), stored, begin, end, f"{self.url}/{file}")

    def _reader(self, file: str) -> Reader:
        if self._opened is None or self._opened[0] != file:
            self.close()
            self._opened = file, self._open.enter_context(self._folder.open(file))
        return self._opened[1]

    def close(self) -> None:
        """Close the file that is open. The next read opens one again."""
        self._opened = None
        self._open.close()

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HuggingFaceSource(WeightsSource):
    """A Hugging Face model's safetensors as a ``Source``. Raises: CheckpointError: as ``SafetensorsWeights``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._weights = SafetensorsWeights(folder)
        weights = self._weights
        super().__init__(weights.info(), weights.url, weights.aliases, weights.notes)

    def read(self, kind: str, name: str) -> torch.Tensor:
        assert kind == MODEL, kind
        return self._weights.read(name)


def cast_dtypes(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each of the model's tensors is written in.

    Args:
        dtype: of all tensors of floating point; None: what the model computes in, and a buffer's own.
    """
    chosen = {}
    for name, info in source.tensors(MODEL).items():
        known = source.about.parameters.get(name, info).dtype
        is_cast = dtype is not None and info.dtype.is_floating_point
        chosen[name] = dtype if is_cast and dtype is not None else known
    return chosen


def write_huggingface(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_nbytes: float = 5e9,
) -> None:
    """Write the model's tensors as ``save_pretrained`` would: safetensors, with an index where there are several files.

    Optimizer state has no place in this format. A tied weight is written once, under its first name; its other names
    are in the header's metadata, as ``safetensors.torch.save_model`` writes them. ``config.json`` is not written.

    Args:
        dtype: cast tensors of floating point to it; None: the dtype that the model computes in.
        max_file_nbytes: begin another file before one gets larger; a larger tensor has a file of its own.

    Raises: CheckpointError: the folder is there already, or a tensor has a dtype that the format lacks.
    Memory: one tensor.
    """
    chosen = cast_dtypes(source, dtype)

    def reading(name: str) -> Callable[[], Sequence[torch.Tensor]]:
        return lambda: [source.read(MODEL, name).to(chosen[name]).reshape(-1)]

    entries = [
        TensorEntry(name, chosen[name], info.shape, reading(name)) for name, info in source.tensors(MODEL).items()
    ]
    shards = _shards(entries, max_file_nbytes)
    many = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    names = many if len(shards) > 1 else [SINGLE]
    with new_folder(folder) as (storage, staging):
        for file, shard in zip(names, shards, strict=True):
            aliases = {other: entry.key for entry in shard for other in source.about.aliases.get(entry.key, ())}
            write_file(storage, staging, file, plan_file(shard, {**_FORMAT, **aliases}))
        if len(shards) > 1:
            weight_map = {entry.key: file for file, shard in zip(names, shards, strict=True) for entry in shard}
            index = {
                "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
                "weight_map": dict(sorted(weight_map.items())),
            }
            with storage.create(f"{staging}/{INDEX}") as sink:
                sink.write(memoryview(json.dumps(index, indent=2).encode()))
                sink.flush()


def _shards(entries: Sequence[TensorEntry], max_file_nbytes: float) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    nbytes = 0
    for entry in entries:
        if shards[-1] and nbytes + entry.nbytes > max_file_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(entry)
        nbytes += entry.nbytes
    return shards


def _shown(names: Sequence[str]) -> str:
    return listed((repr(name[:200]) for name in names), _MAX_NAMED)
