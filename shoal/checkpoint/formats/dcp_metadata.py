"""The ``.metadata`` of a ``torch.distributed.checkpoint`` folder: which tensors there are and where their chunks lie.

The file is a pickle of a handful of dataclasses; ``safe_unpickling`` reads it, so none of them is made. Everything in
it is checked before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.formats import safe_unpickling
from shoal.checkpoint.formats.safe_unpickling import Built, Symbol
from shoal.checkpoint.formats.untrusted_files import UntrustedFolder, check_name
from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.rectangles import Rectangle, cover_problem
from shoal.checkpoint.tree import DTYPES
from shoal.errors import CheckpointError

NAME = ".metadata"
_MAX_NBYTES = 1 << 30
_DCP = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
_EXPECTED = frozenset(
    [f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")]
    + [f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")]
    + [f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_DCP}.filesystem._StorageInfo"]
    + ["torch.Size", "torch.device", "torch.strided", "torch.serialization._get_layout", "collections.OrderedDict"]
    + [f"pathlib{part}.{name}" for part in ("", "._local") for name in ("Path", "PosixPath", "WindowsPath")]
    + list(_DTYPES)
)

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class FileRange:
    """A part of a file: what ``torch.save`` made of one chunk, or of one object that is no tensor."""

    file: str
    offset: int
    nbytes: int
    rectangle: Rectangle | None = None  # of the tensor


@dataclass(frozen=True)
class Item:
    """A leaf of the saved tree.

    Args:
        path: its keys from the root, ``("optim", "state", "layers.0.w", "exp_avg")``.
        dtype: None: no tensor.
    """

    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    parts: tuple[FileRange, ...]


def read_metadata(folder: UntrustedFolder) -> list[Item]:
    """Every leaf of a checkpoint.

    Raises: CheckpointError: the file asks for something that does not belong there, or says what cannot be.
    """
    where = f"{folder.url}/{NAME}"
    content = safe_unpickling.read(folder.read(NAME, _MAX_NBYTES), _EXPECTED, where)
    return list(_MetadataReader(folder, where).items(content))


class _MetadataReader:
    def __init__(self, folder: UntrustedFolder, where: str) -> None:
        self._folder = folder
        self._where = where
        self._sizes: dict[str, int] = {}

    def items(self, content: Any) -> Iterator[Item]:
        metadata = self._is(content, f"{_DCP}.metadata.Metadata")
        described, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if not isinstance(described, dict) or not isinstance(places, dict):
            raise self._unsafe("it describes no tensors")
        paths = metadata.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        by_name: dict[str, list[tuple[tuple[int, ...] | None, Built]]] = {}
        for index, info in places.items():
            fqn = self._is(index, f"{_DCP}.metadata.MetadataIndex").get("fqn")
            offset = index.get("offset")
            key = None if offset is None else self._size(offset)
            by_name.setdefault(self._text(fqn), []).append((key, self._is(info, f"{_DCP}.filesystem._StorageInfo")))
        for name, value in described.items():
            yield self._item(self._text(name), self._path(paths.get(name, (name,))), value, by_name.get(name, []))

    def _item(self, name: str, path: Path, value: Any, places: list[tuple[tuple[int, ...] | None, Built]]) -> Item:
        if isinstance(value, Built) and value.name == f"{_DCP}.metadata.BytesStorageMetadata":
            return Item(path, None, (), tuple(self._part(name, info, None) for _, info in places[:1]))
        described = self._is(value, f"{_DCP}.metadata.TensorStorageMetadata")
        shape = self._size(described.get("size"))
        dtype = self._dtype(name, described.get("properties"))
        chunks = described.get("chunks")
        if not isinstance(chunks, list):
            raise self._unsafe(f"{name!r} has no list of chunks")
        by_offset = dict(places)
        parts = []
        for chunk in chunks:
            held = self._is(chunk, f"{_DCP}.metadata.ChunkStorageMetadata")
            start, sizes = self._size(held.get("offsets")), self._size(held.get("sizes"))
            if not math.prod(sizes):
                continue
            if start not in by_offset:
                raise self._unsafe(f"nothing says where the chunk at {list(start)} of {name!r} lies")
            parts.append(self._part(name, by_offset[start], Rectangle(start, sizes)))
            if math.prod(sizes) * dtype.itemsize > parts[-1].nbytes:
                raise self._unsafe(
                    f"the chunk at {list(start)} of {name!r} has shape {list(sizes)} and {parts[-1].nbytes} bytes"
                )
        problem = cover_problem(shape, [part.rectangle for part in parts if part.rectangle is not None])
        if problem is not None:
            raise self._unsafe(f"{name!r} is not whole: {problem}")
        return Item(path, dtype, shape, tuple(parts))

    def _part(self, name: str, info: Built, rectangle: Rectangle | None) -> FileRange:
        file, offset, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{name!r} was transformed by {str(info.get('transform_descriptors'))[:100]} when it was saved.",
                where=self._where,
                do="save the checkpoint without extensions.",
                code="checkpoint-format",
            )
        file = self._text(file)
        check_name(file, self._where)
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
            raise self._unsafe(f"{name!r} lies at {offset!r} with {nbytes!r} bytes")
        if file not in self._sizes:
            with self._folder.open(file) as opened:
                self._sizes[file] = opened.nbytes
        if offset + nbytes > self._sizes[file]:
            raise damaged_copy(
                f"{file} has {self._sizes[file]} bytes, and {name!r} lies at {offset} with {nbytes}.", self._where
            )
        return FileRange(file, offset, nbytes, rectangle)

    def _dtype(self, name: str, properties: Any) -> torch.dtype:
        state = self._is(properties, f"{_DCP}.metadata.TensorProperties").state
        first = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(first, Symbol) or first.name not in _DTYPES:
            raise self._unsafe(f"{name!r} has no dtype")
        return _DTYPES[first.name]

    def _size(self, value: Any) -> tuple[int, ...]:
        """A ``torch.Size``: Built("torch.Size", ((2, 3),))."""
        sizes = self._is(value, "torch.Size").arguments[:1]
        if not sizes or not isinstance(sizes[0], tuple) or len(sizes[0]) > 64:
            raise self._unsafe("a shape is no tuple")
        if not all(type(size) is int and 0 <= size <= 2**62 for size in sizes[0]):
            raise self._unsafe(f"a shape is {str(sizes[0])[:100]}")
        return tuple(sizes[0])

    def _path(self, value: Any) -> Path:
        if not isinstance(value, tuple) or not value or not all(type(key) in (str, int) for key in value):
            raise self._unsafe("a leaf's path is not made of keys")
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self._unsafe(f"a name is a {type(value).__name__}")
        return value

    def _is(self, value: Any, name: str) -> Built:
        if not isinstance(value, Built) or value.name != name:
            found = value.name if isinstance(value, Built) else type(value).__name__
            raise self._unsafe(f"there is a {found} where a {name} belongs")
        return value

    def _unsafe(self, what: str) -> CheckpointError:
        return unsafe(f"it says what cannot be: {what}.", self._where)
