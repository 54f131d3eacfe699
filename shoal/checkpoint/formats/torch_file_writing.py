"""The file that ``torch.save`` writes (``torch_file``), written one tensor after the other.

``torch.save`` needs all tensors at once. Its format does not: it is a zip file of stored entries, of which the first
says what there is, and each other one is the bytes of one tensor.
"""

from __future__ import annotations

import math
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from shoal.checkpoint.portable import TensorInfo
from shoal.errors import CheckpointError

_ALIGNMENT = 64
_ZIP64_NBYTES = 1 << 31
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
_UNTYPED = (torch.float8_e4m3fn, torch.float8_e5m2)


class Stream(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: memoryview, /) -> object: ...


@dataclass(eq=False)
class DeferredTensor:
    """A tensor that is read when its bytes are written."""

    info: TensorInfo
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class ClassInstance:
    """An object of another program's class, which the reader has. Neither its class nor its methods are needed here."""

    module: str
    name: str
    attributes: Mapping[str, Any]


def write_tensors(
    stream: Stream,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], torch.Tensor],
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write a dict of tensors.

    Args:
        read: gives a tensor of the dtype and shape that ``tensors`` says; called for each in turn.
        aliases: other names of a tensor; read, they are the same object.

    Raises: CheckpointError: a dtype that the format lacks.
    Memory: one tensor.
    """
    values: dict[str, DeferredTensor] = {}
    for name, info in tensors.items():
        deferred = DeferredTensor(info, partial(read, name))
        values |= dict.fromkeys((name, *(aliases or {}).get(name, ())), deferred)
    write_values(stream, values)


def write_values(stream: Stream, value: Any) -> None:
    """Write nested plain values and tensors, as ``torch.save`` would; ``torch.load(weights_only=True)`` reads them.

    Args:
        value: None, booleans, numbers, text, dtypes, devices, tensors, and dicts, lists and tuples of them. Of tensors
            that are the same memory one is written. A path is written as text, an array as a tensor; a namespace is
            read with ``weights_only=False`` alone.

    Raises: CheckpointError: anything else, before a byte is written.
    Memory: one tensor, of those that are deferred, not on the host, or not contiguous.
    """
    with TorchFile(stream, value) as file:
        for tensor in file.tensors:
            file.add(tensor.read() if isinstance(tensor, DeferredTensor) else tensor)


class TorchFile:
    """A file as ``write_values`` writes it, to which the caller adds the tensors.

    Attributes: ``tensors``: what has to be added, in this order.
    """

    def __init__(self, stream: Stream, value: Any) -> None:
        tensors = _Tensors()
        data = b"\x80\x02" + _value(value, tensors) + b"."
        self.tensors = tensors.in_order
        self._archive = _Archive(stream)
        self._num_added = 0
        self._archive.add("data.pkl", data)
        self._archive.add("byteorder", b"little")

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        with self.next_tensor(tensor.nbytes) as append:
            append(tensor)

    @contextmanager
    def next_tensor(self, nbytes: int) -> Iterator[Callable[[torch.Tensor], None]]:
        """Write the next tensor in parts. Gives a function that appends the values of a part."""
        with self._archive.entry(f"data/{self._num_added}", nbytes) as write:
            yield lambda part: write(_bytes_of(part))
        self._num_added += 1

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._archive.add("version", b"3\n")
            self._archive.close()


def _bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


# data.pkl: protocol 2 of Python's object format, of which a dict of tensors needs a dozen instructions. "(" opens a
# tuple and "t" closes it, "c" names a function, "R" calls it, "Q" asks for a storage, "u" fills the dict, "e" a list,
# "r" keeps an object under a number and "j" gives it again.


def _tensor(key: str, info: TensorInfo) -> bytes:
    numel = math.prod(info.shape)
    storage = _STORAGES.get(info.dtype)
    if storage is None and info.dtype not in _UNTYPED:
        raise CheckpointError(f"torch.save's format is not written for {info.dtype}.", code="checkpoint-format")
    home = "torch" if storage is not None else "torch.storage"
    size = numel if storage is not None else numel * info.dtype.itemsize
    function = "_rebuild_tensor_v2" if storage is not None else "_rebuild_tensor_v3"
    strides = [math.prod(info.shape[dim + 1 :]) for dim in range(len(info.shape))]
    storage_key = _text("storage") + _name(home, storage or "UntypedStorage") + _text(key) + _text("cpu") + _count(size)
    arguments = b"(" + storage_key + b"tQ" + _count(0) + _tuple(info.shape) + _tuple(strides) + b"\x89"
    arguments += _name("collections", "OrderedDict") + b")R"
    if storage is None:
        arguments += _name("torch", str(info.dtype).removeprefix("torch."))
    return _name("torch._utils", function) + b"(" + arguments + b"tR"


class _Tensors:
    """The tensors of a file in the order in which they are written; what is the same memory throughout comes once."""

    def __init__(self) -> None:
        self.in_order: list[torch.Tensor | DeferredTensor] = []
        self._number: dict[object, int] = {}
        self._objects: dict[int, bytes] = {}  # numbers under which deferred tensors are kept, by ``id``

    def pickled(self, tensor: torch.Tensor) -> bytes:
        number = len(self.in_order)
        if tensor.numel() and tensor.is_contiguous():
            memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.numel())
            number = self._number.setdefault(memory, number)
        if number == len(self.in_order):
            self.in_order.append(tensor)
        return _tensor(str(number), TensorInfo(tensor.dtype, tuple(tensor.shape)))

    def pickled_deferred(self, tensor: DeferredTensor) -> bytes:
        """Where the same one comes again, the reader gets the same object."""
        if id(tensor) in self._objects:
            return b"j" + self._objects[id(tensor)]
        self._objects[id(tensor)] = number = len(self._objects).to_bytes(4, "little")
        self.in_order.append(tensor)
        return _tensor(str(len(self.in_order) - 1), tensor.info) + b"r" + number


def _value(value: Any, tensors: _Tensors) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _count(int(value))
    if isinstance(value, float):
        return b"G" + struct.pack(">d", float(value))
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, torch.Tensor):
        return tensors.pickled(value.detach())
    if isinstance(value, DeferredTensor):
        return tensors.pickled_deferred(value)
    if isinstance(value, torch.dtype):
        return _name("torch", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return _name("torch", "device") + b"(" + _text(str(value)) + b"tR"
    if isinstance(value, np.generic):
        return _value(value.item(), tensors)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return tensors.pickled(torch.from_numpy(np.array(value, order="C")))
    if isinstance(value, Namespace | SimpleNamespace):
        kind = Namespace if isinstance(value, Namespace) else SimpleNamespace
        return _value(ClassInstance(kind.__module__, kind.__name__, vars(value)), tensors)
    if isinstance(value, Mapping):
        rows = b"".join(_value(key, tensors) + _value(inner, tensors) for key, inner in value.items())
        return b"}(" + rows + b"u"
    if isinstance(value, ClassInstance):  # an object made without arguments, then its attributes
        return _name(value.module, value.name) + b")\x81" + _value(value.attributes, tensors) + b"b"
    if isinstance(value, list | set | frozenset):
        return b"](" + b"".join(_value(inner, tensors) for inner in value) + b"e"
    if isinstance(value, torch.Size):
        return _name("torch", "Size") + b"(" + _tuple(value) + b"tR"
    if isinstance(value, tuple):
        return b"(" + b"".join(_value(inner, tensors) for inner in value) + b"t"
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} is not a plain value.",
        do="keep numbers, text, lists, dicts and tensors.",
        code="checkpoint-state",
    )


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _count(value: int) -> bytes:
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_count, values)) + b"t"


class _Archive:
    """A zip file whose entries are stored, each beginning at a multiple of 64."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._position = 0
        # An object that only writes: zipfile then goes back to nothing, and the stream may stand anywhere in a file.
        self._zip = zipfile.ZipFile(self, "w", zipfile.ZIP_STORED)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        self._stream.write(view)
        self._position += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        return

    def add(self, name: str, data: bytes) -> None:
        with self.entry(name, len(data)) as write:
            write(data)

    @contextmanager
    def entry(self, name: str, nbytes: int) -> Iterator[Callable[[bytes | memoryview], Any]]:
        """Begin an entry of ``nbytes``. Gives a function that appends to it."""
        entry = zipfile.ZipInfo(f"archive/{name}")
        is_large = nbytes >= _ZIP64_NBYTES
        header = 30 + len(entry.filename) + (20 if is_large else 0) + 4
        fill = -(self._position + header) % _ALIGNMENT
        entry.extra = b"FB" + struct.pack("<H", fill) + b"\0" * fill
        with self._zip.open(entry, "w", force_zip64=is_large) as file:
            yield file.write

    def close(self) -> None:
        self._zip.close()
