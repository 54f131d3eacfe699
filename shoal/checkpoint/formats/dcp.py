"""Reads plain ``torch.distributed.checkpoint`` folders: the model, and the optimizer as FSDP2's users save it.

    {"model": {"layers.0.w": ...},
     "optim": {"state": {"layers.0.w": {"exp_avg": ..., "step": ...}}, "param_groups": [{"lr": ..., "params": [...]}]}}

is what ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives; with ``flatten_optimizer_state_dict`` the
optimizer's part is ``{"state.layers.0.w.exp_avg": ..., "param_groups.layers.0.w.lr": ...}``. Both may lie deeper
(``{"app": {"model": ...}}``), and a bare ``model.state_dict()`` is read too.

The file ``.metadata`` says which tensors there are and where their chunks lie. It is a pickle of a handful of
dataclasses; ``safe_unpickling`` reads it, so none of them is created. Everything in it is checked before it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.formats import safe_unpickling
from shoal.checkpoint.formats.safe_unpickling import Built, Symbol
from shoal.checkpoint.formats.torch_file import load_part
from shoal.checkpoint.formats.untrusted_files import UntrustedFolder, check_name
from shoal.checkpoint.manifest import MODEL
from shoal.checkpoint.portable import TensorInfo, about_bare, join
from shoal.checkpoint.problems import damaged_copy, unsafe
from shoal.checkpoint.rectangles import Rectangle, cover_problem, whole
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
            extent = self._is(chunk, f"{_DCP}.metadata.ChunkStorageMetadata")
            start, sizes = self._size(extent.get("offsets")), self._size(extent.get("sizes"))
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
            actual = value.name if isinstance(value, Built) else type(value).__name__
            raise self._unsafe(f"there is a {actual} where a {name} belongs")
        return value

    def _unsafe(self, what: str) -> CheckpointError:
        return unsafe(f"it says what cannot be: {what}.", self._where)


_MODEL_KEYS = ("model", "module", "state_dict")
_OPTIMIZER_KEYS = ("optim", "optimizer", "optimizers")
_MAX_OBJECT_NBYTES = 64 << 20


class DcpSource:
    """A ``torch.distributed.checkpoint`` folder as a ``Source``.

    Raises: CheckpointError: no such folder, a part is missing or cut off, it asks for more than tensors, or there is no
        model in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = UntrustedFolder(folder)
        self._items: dict[tuple[str, str], Item] = {}
        sorting = _Sorted(read_metadata(self._folder))
        if not sorting.model:
            raise CheckpointError(
                f"there is no model in it, but {', '.join(map(repr, sorting.tops)) or 'nothing'}.",
                where=self._folder.url,
                do='save {"model": model.state_dict(), ...}.',
                code="checkpoint-format",
            )
        aliases = _take_aliases(sorting.model)
        tensors = {name: TensorInfo(_dtype(item), item.shape) for name, item in sorting.model.items()}
        trained = {name for name, _ in sorting.state} & tensors.keys()
        self.about = about_bare(tensors, self._folder.url, aliases, known_parameters=trained)
        self._kinds: dict[str, dict[str, TensorInfo]] = {MODEL: tensors}
        self._items.update({(MODEL, name): item for name, item in sorting.model.items()})
        self._take_state(sorting, tensors)
        self._take_groups(sorting)
        self._take_twins()
        self.about.optimizer = _optimizer(self._kinds, self.about.groups)
        if self.about.optimizer is None and len(self._kinds) > 1:
            self.about.notes.append("the optimizer's class is not stored, and its state does not show it.")
        if sorting.left:
            self.about.notes.append(f"{', '.join(map(repr, sorting.left[:5]))}: neither model nor optimizer; left out.")

    def _take_state(self, sorting: _Sorted, tensors: Mapping[str, TensorInfo]) -> None:
        for (name, key), item in sorting.state.items():
            if name not in tensors:
                self.about.notes.append(f"optimizer state {key!r} of {name!r}, which is not in the model; left out.")
            elif item.dtype is None or (not item.shape and (key == "step" or tensors[name].shape)):
                self.about.scalars.setdefault(name, {})[key] = self._object(item)
            elif item.shape == tensors[name].shape:
                kind = f"optimizer/{key}"
                self._kinds.setdefault(kind, {})[name] = TensorInfo(_dtype(item), item.shape)
                self._items[kind, name] = item
            else:
                self.about.notes.append(
                    f"optimizer state {key!r} of {name!r} has shape {list(item.shape)}, the parameter"
                    f" {list(tensors[name].shape)}; left out."
                )

    def _take_groups(self, sorting: _Sorted) -> None:
        """Groups by index with their parameters' names in ``params``, or hyperparameters by parameter."""
        groups: list[dict[str, Any]] = []
        for index in sorted(sorting.groups):
            values = {key: self._object(item) for key, item in sorting.groups[index].items()}
            names = values.pop("params", [])
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                self.about.notes.append(f"param_groups[{index}] gives its parameters no names; left out.")
                continue
            self.about.group_of.update(dict.fromkeys(names, len(groups)))
            groups.append(values)
        for name, items in sorting.flat_groups.items():
            values = {key: self._object(item) for key, item in items.items()}
            if values not in groups:
                groups.append(values)
            self.about.group_of[name] = groups.index(values)
        self.about.groups = groups

    def _take_twins(self) -> None:
        """Find tied weights, which PyTorch saves once per name: a matrix without optimizer state that has the bits of
        one with it.
        """
        trained = self.about.group_of.keys() & self.about.parameters.keys()
        alone = [name for name, info in self.about.parameters.items() if name not in trained and len(info.shape) > 1]
        if not trained or not alone:
            return
        by_sample: dict[tuple[object, ...], list[str]] = {}
        for name in sorted(trained):
            by_sample.setdefault(self._sample(name), []).append(name)
        for name in alone:
            for twin in by_sample.get(self._sample(name), ()):
                if torch.equal(self.read(MODEL, name), self.read(MODEL, twin)):
                    self.about.aliases[twin] = (*self.about.aliases.get(twin, ()), name)
                    self.about.notes.append(f"{name!r} has the bits of {twin!r} and is not trained: treated as tied.")
                    del self._kinds[MODEL][name], self.about.parameters[name]
                    break

    def _sample(self, name: str) -> tuple[object, ...]:
        """What differs between most tensors that differ, at the cost of one small read."""
        item = self._items[MODEL, name]
        if not item.parts:
            return (name,)
        part = item.parts[0]
        data = bytearray(min(4096, part.nbytes))
        with self._folder.open(part.file) as file:
            file.read_into(part.offset + (part.nbytes - len(data)) // 2, memoryview(data))
        return item.dtype, item.shape, tuple(part.rectangle for part in item.parts), bytes(data)

    def kinds(self) -> Iterable[str]:
        return tuple(self._kinds)

    def tensors(self, kind: str) -> Mapping[str, TensorInfo]:
        return self._kinds.get(kind, {})

    def read(self, kind: str, name: str) -> torch.Tensor:
        return self._tensor(self._items[kind, name])

    def _tensor(self, item: Item) -> torch.Tensor:
        """One tensor. Memory: it, and while it is put together one chunk of it."""
        if len(item.parts) == 1 and item.parts[0].rectangle == whole(item.shape):
            return self._chunk(item, item.parts[0])
        slices = ((part.rectangle, self._chunk(item, part)) for part in item.parts if part.rectangle is not None)
        return join(TensorInfo(_dtype(item), item.shape), slices)

    def _chunk(self, item: Item, part: FileRange) -> torch.Tensor:
        assert part.rectangle is not None
        value = self._load(part)
        shape, dtype = part.rectangle.shape, _dtype(item)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise damaged_copy(
                f"byte {part.offset} of {part.file} holds a {actual}, and .metadata says {dtype} {list(shape)}.",
                self._folder.url,
            )
        return value

    def _object(self, item: Item) -> Any:
        if item.dtype is not None:
            return self._tensor(item)
        if not item.parts or item.parts[0].nbytes > _MAX_OBJECT_NBYTES:
            problem = "missing" if not item.parts else "too large for what it is"
            raise damaged_copy(f"{'.'.join(map(str, item.path))} is {problem}.", self._folder.url)
        return self._load(item.parts[0])

    def _load(self, part: FileRange) -> Any:
        where = f"byte {part.offset} of {self._folder.url}/{part.file}"
        with self._folder.open(part.file) as file:
            return load_part(file, part.offset, part.nbytes, where)


def _take_aliases(model: dict[str, Item]) -> dict[str, tuple[str, ...]]:
    """Remove names whose bytes are another's, as Shoal writes tied weights. Returns: the other names, by name."""
    first: dict[tuple[FileRange, ...], str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, item in list(model.items()):
        same = first.setdefault(item.parts, name) if item.parts else name
        if same != name:
            aliases[same] = (*aliases.get(same, ()), name)
            del model[name]
    return aliases


def _optimizer(kinds: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The class of torch.optim that has such state and such hyperparameters, if they show it."""
    state = {kind.partition("/")[2] for kind in kinds if kind != MODEL}
    known = {key for group in groups for key in group}
    if {"exp_avg", "exp_avg_sq"} <= state and "betas" in known:
        # Both classes store it since 2.9; before, nothing distinguished them.
        is_decoupled = all(group.get("decoupled_weight_decay", True) for group in groups)
        return "AdamW" if is_decoupled else "Adam"
    if state <= {"momentum_buffer"} and "nesterov" in known:
        return "Muon" if "ns_steps" in known else "SGD"
    if state == {"sum"} and "lr_decay" in known:
        return "Adagrad"
    return None


def _dtype(item: Item) -> torch.dtype:
    assert item.dtype is not None
    return item.dtype


class _Sorted:
    """Leaves by what they are."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.model: dict[str, Item] = {}
        self.state: dict[tuple[str, str], Item] = {}  # by parameter and key
        self.groups: dict[int, dict[str, Item]] = {}
        self.flat_groups: dict[str, dict[str, Item]] = {}  # by parameter
        self.left: list[str] = []
        self.tops: list[str] = []
        bare: dict[str, Item] = {}
        for item in items:
            self.tops = list(dict.fromkeys([*self.tops, str(item.path[0])]))
            if not self._sort(item) and not (len(item.path) == 1 and item.dtype is not None):
                self.left.append(".".join(map(str, item.path)))
            elif len(item.path) == 1 and item.dtype is not None:
                bare[str(item.path[0])] = item
        if not self.model:
            self.model = bare  # the state_dict itself was saved
        else:
            self.left += bare

    def _sort(self, item: Item) -> bool:
        for depth, key in enumerate(item.path[:-1]):
            rest = item.path[depth + 1 :]
            if key in _OPTIMIZER_KEYS:
                return self._sort_optimizer(rest, item)
            if key in _MODEL_KEYS:
                if item.dtype is None:
                    return False
                self.model[".".join(map(str, rest))] = item
                return True
        return False

    def _sort_optimizer(self, rest: Path, item: Item) -> bool:
        first = str(rest[0])
        if first == "state" and len(rest) == 3 and isinstance(rest[1], str):
            self.state[rest[1], str(rest[2])] = item
        elif first == "param_groups" and len(rest) == 3 and isinstance(rest[1], int):
            self.groups.setdefault(rest[1], {})[str(rest[2])] = item
        elif len(rest) == 1 and first.startswith("state."):
            name, _, key = first.removeprefix("state.").rpartition(".")
            self.state[name, key] = item
        elif len(rest) == 1 and first.startswith("param_groups."):
            name, _, key = first.removeprefix("param_groups.").rpartition(".")
            self.flat_groups.setdefault(name, {})[key] = item
        else:
            return False
        return True
