"""The manifest: the JSON file that says what a checkpoint holds and where every byte of it is.

    {"checksum": "xxh3:0123456789abcdef",          over all bytes after this line
    "format": 2, "tag": "global_step10", ...
     "parameters": [{"name": "layers.0.w", "dtype": "bfloat16", "shape": [4, 5], "group": 0, ...}],
     "tensors":    [{"kind": "model", "name": "layers.0.w", "dtype": "float32", "shape": [4, 5],
                     "chunks": [[0, 4096, [0, 0], [2, 5]], [1, 4096, [2, 0], [2, 5]]], "sums": [17, 4]}],
     "files":      [{"name": "rank-00000.safetensors", "nbytes": 8192, "block_nbytes": 4194304, "blocks": ["..."]}]}

A chunk is (file, offset in bytes, start, shape): a rectangle of the tensor, contiguous in one file. The kinds are

    model              a parameter's value (the fp32 master weight where there is one) or a buffer's
    optimizer/KEY      optimizer state of one element per element of the parameter
    rank/R             what only rank R has: its RNG states, buffers that differ from rank 0's, unfinished gradients
    extra              tensors inside the schedule's and the client's state

The sums are those of ``element_sums`` over the whole tensor: a load compares them with what it has set. Files of format
1 have none.

A manifest is not trusted: names stay inside the folder, and every length is checked before memory is allocated.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from itertools import pairwise
from typing import Annotated, Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from shoal.checkpoint.problems import damaged, unsafe
from shoal.checkpoint.rectangles import Rectangle, cover_problem
from shoal.checkpoint.tree import dtype_of
from shoal.errors import CheckpointError

FORMAT = 2
NAME = "manifest.json"
MODEL = "model"  # the kind of parameters and buffers
OPTIMIZER = "optimizer/"  # and a key: the kind of optimizer state
EXTRA = "extra"
MAX_SMALL_BLOCK = 4 << 20  # bytes of a block whatever its file's size
_MAX_FREE_BYTES = 4 << 20  # a manifest may be this large whatever it describes, and then
_MAX_SHARE = 32  # one byte for so many bytes of tensors
_MAX_FREE_LISTS = 150_000  # lists, objects and keys, which take far more memory than their text, and then
_MAX_LIST_SHARE = 256  # one for so many bytes of tensors
_MAX_DEPTH = 500  # of lists in lists
_MAX_KEYS = 100  # of an object whose keys are known

Count = Annotated[int, Field(ge=0, le=2**62)]
Text = Annotated[str, Field(max_length=4096)]
# JSON has no tuples: these are made of its lists. Lists stop at their first error, so that a hostile one stays cheap.
Shape = Annotated[tuple[Count, ...], Field(max_length=64, strict=False), FailFast()]
Chunk = Annotated[tuple[Count, Count, Shape, Shape], Field(strict=False)]
_FIRST_LINE = re.compile(rb'\{"checksum":"xxh3:([0-9a-f]{16})",\n')
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Model):
    """One file of tensors, and the checksums of its blocks."""

    name: Text
    nbytes: Count
    block_nbytes: Annotated[int, Field(ge=1)]
    blocks: Annotated[list[Text], FailFast()]  # xxh3, 64 bits, hexadecimal; one per block of ``block_nbytes``


class TensorRecord(_Model):
    """One logical tensor and the chunks that hold it."""

    kind: Text
    name: Text
    dtype: Text
    shape: Shape
    chunks: Annotated[list[Chunk], FailFast()]
    sums: Annotated[tuple[Count, Count], Field(strict=False)] | None = None  # None: not known

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rectangles(self) -> list[Rectangle]:
        return [Rectangle(start, shape) for _, _, start, shape in self.chunks]


class ParameterRecord(_Model):
    """One parameter as the model has it."""

    name: Text
    aliases: Annotated[list[Text], FailFast()] = []  # other names of the same parameter (tied weights)
    dtype: Text
    shape: Shape
    group: int | None = None  # of the optimizer; None: not trained
    position: int | None = None  # in the optimizer's order; None: the model's order
    scalars: dict[str, Any] = {}  # optimizer state that is one number for the whole parameter: {"step": tree}


class Manifest(_Model):
    """What one checkpoint holds."""

    format: int = FORMAT
    tag: Text
    step: Count
    created: Text  # ISO 8601, UTC
    is_for_resuming: bool = True  # False: loaded only where its tag is asked for (``save_latest=False``)
    versions: dict[str, str]
    world: dict[str, Any] = {}  # ranks and axes that saved it
    table: Annotated[list[dict[str, str]], FailFast()] = []
    config: dict[str, Any] = {}  # the effective one
    groups: list[Any] = []  # the optimizer's hyperparameters by group, as trees
    optimizer: Text | None = None  # its class
    parameters: Annotated[list[ParameterRecord], FailFast()]
    tensors: Annotated[list[TensorRecord], FailFast()]
    files: Annotated[list[FileRecord], FailFast()]
    engine: dict[str, Any] = {}  # counters, schedule, loss scale, data position: trees
    client_state: Any = None

    def find(self, kind: str, name: str) -> TensorRecord | None:
        return self.by_key.get((kind, name))

    @property
    def by_key(self) -> dict[tuple[str, str], TensorRecord]:
        records = self.__dict__.get("_by_key")
        if records is None:
            records = {(tensor.kind, tensor.name): tensor for tensor in self.tensors}
            self.__dict__["_by_key"] = records
        return records

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.nbytes for file in self.files)


@cache
def versions() -> dict[str, str]:
    """Of Shoal, torch and Python."""
    try:
        shoal = metadata.version("shoal")
    except metadata.PackageNotFoundError:
        shoal = "from a folder"
    return {"shoal": shoal, "torch": torch.__version__, "python": platform.python_version()}


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def dump(manifest: Manifest) -> bytes:
    """The file's bytes, its checksum in the first line."""
    body = json.dumps(manifest.model_dump(mode="json"), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    rest = body[1:].encode()
    return f'{{"checksum":"xxh3:{checksum(rest)}",\n'.encode() + rest


def parse(data: bytes, where: str, tensor_bytes: int = 0) -> Manifest:
    """Check and read a manifest's bytes.

    Args:
        tensor_bytes: of the files that it describes: what describes much may be large.

    Raises: CheckpointError: it is damaged, of a newer format, or says something that cannot be.
    Memory: what it says, and a few dozen megabytes if it is hostile.
    """
    match = _FIRST_LINE.match(data)
    if match is None:
        raise _unreadable(where, "it does not begin with its checksum")
    rest = memoryview(data)[match.end() :]
    expected, actual = match.group(1).decode(), checksum(rest)
    if actual != expected:
        raise _unreadable(where, f"its checksum is {actual}, and {expected} was written")
    if (problem := _size_problem(data, tensor_bytes)) is not None:
        raise _impossible(where, problem)
    with collecting_nothing():
        return _parse(rest, where)


def _parse(rest: memoryview, where: str) -> Manifest:
    try:
        raw = json.loads("{" + str(rest, "utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, f"it is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise _unreadable(where, "it is not a JSON object")
    _check_format(raw.get("format"), raw.get("versions"), where)
    if (problem := _nesting_problem(raw)) is not None:
        raise _impossible(where, problem)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        raise _unreadable(where, _first_problems(error)) from error
    _check(manifest, where)
    return manifest


def most_bytes(tensor_bytes: int) -> int:
    """How long a manifest may be that describes files of ``tensor_bytes`` in all."""
    return _MAX_FREE_BYTES + tensor_bytes // _MAX_SHARE


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Disable the garbage collector: creating many lists would run it again and again, and it would free nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_oversized(data: bytes, tensor_bytes: int, where: str) -> None:
    """Check a manifest before it is written: one that ``parse`` would refuse is an error now.

    Raises: CheckpointError: the state that is no tensor is too large for JSON.
    """
    if (problem := _size_problem(data, tensor_bytes)) is not None:
        raise CheckpointError(
            f"what is saved beside the tensors is too large: {problem}.",
            where=where,
            do="keep large values in client_state (and in the schedule's or loader's state) as tensors or arrays.",
            code="checkpoint-state",
        )


def _size_problem(data: bytes, tensor_bytes: int) -> str | None:
    if len(data) > (most := most_bytes(tensor_bytes)):
        return f"the manifest has {len(data)} bytes, and at most {most} are allowed beside {tensor_bytes} of tensors"
    num_lists = data.count(b"[") + data.count(b"{") + data.count(b'":')
    if num_lists > (most := _MAX_FREE_LISTS + tensor_bytes // _MAX_LIST_SHARE):
        return f"the manifest has {num_lists} lists, objects and keys, and at most {most} are allowed"
    return None


def _nesting_problem(raw: dict[str, Any]) -> str | None:
    """Lists nested too deeply, or an object with too many keys."""
    records = [entry for key in ("parameters", "tensors", "files", "table") for entry in _listed(raw.get(key))]
    for known in (raw, raw.get("versions"), *records):
        if isinstance(known, dict) and len(known) > _MAX_KEYS:
            return f"an object has {len(known)} keys"
    level: list[Any] = [raw]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            inside = value.values() if isinstance(value, dict) else value
            inner += [item for item in inside if isinstance(item, dict | list)]
        if not inner:
            return None
        level = inner
    return f"it is nested deeper than {_MAX_DEPTH}"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_format(number: Any, versions: Any, where: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _unreadable(where, f"its format is {number!r}")
    if number > FORMAT:
        writer = versions.get("shoal", "of an unknown version") if isinstance(versions, dict) else "of unknown version"
        raise CheckpointError(
            f"the checkpoint has format {number} and was written by Shoal {writer}; this one reads up to {FORMAT}.",
            where=where,
            do="load it with that version, or a newer one.",
            code="checkpoint-version",
        )


def _check(manifest: Manifest, where: str) -> None:
    """Raises: CheckpointError: names, places or sizes that cannot be right."""
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise _impossible(where, "a file is named twice")
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or ".." in file.name or file.name == NAME:
            raise _impossible(where, f"file name {file.name[:100]!r} is not a plain name inside the folder")
        if file.block_nbytes % 64 or file.block_nbytes > max(MAX_SMALL_BLOCK, file.nbytes // 128):
            raise _impossible(where, f"{file.name} has blocks of {file.block_nbytes} bytes")
        if len(file.blocks) != -(-file.nbytes // file.block_nbytes):
            raise _impossible(where, f"{file.name} has {len(file.blocks)} block sums for {file.nbytes} bytes")
    seen: set[tuple[str, str]] = set()
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        label = f"{tensor.kind} {tensor.name!r}"
        if (tensor.kind, tensor.name) in seen:
            raise _impossible(where, f"{label} is there twice")
        seen.add((tensor.kind, tensor.name))
        itemsize = dtype_of(tensor.dtype).itemsize
        for file_index, offset, _, shape in tensor.chunks:
            nbytes = math.prod(shape) * itemsize
            if file_index >= len(manifest.files):
                raise _impossible(where, f"{label} lies in file {file_index} of {len(manifest.files)}")
            if offset % itemsize or offset + nbytes > manifest.files[file_index].nbytes:
                raise _impossible(
                    where,
                    f"{label} lies at {offset} with {nbytes} bytes in {names[file_index]}"
                    f" of {manifest.files[file_index].nbytes}",
                )
            spans[file_index].append((offset, offset + nbytes))
        problem = cover_problem(tensor.shape, tensor.rectangles())
        if problem is not None:
            raise _impossible(where, f"{label} is not whole: {problem}")
    for file, ranges in zip(manifest.files, spans, strict=True):
        ranges.sort()
        for (_, end), (begin, _) in pairwise(ranges):
            if begin < end:
                raise _impossible(where, f"two chunks overlap at byte {begin} of {file.name}")
    shapes = {parameter.name: parameter.shape for parameter in manifest.parameters}
    if len(shapes) != len(manifest.parameters):
        raise _impossible(where, "a parameter is named twice")
    for tensor in manifest.tensors:
        is_state = tensor.kind.startswith(OPTIMIZER)
        if (is_state or tensor.kind == MODEL) and shapes.get(tensor.name, tensor.shape) != tensor.shape:
            meant = list(shapes[tensor.name])
            raise _impossible(
                where, f"{tensor.kind} {tensor.name!r} has shape {list(tensor.shape)}, the parameter {meant}"
            )


def _first_problems(error: ValidationError) -> str:
    shown = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:3]]
    return "; ".join(shown)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _unreadable(where: str, what: str) -> CheckpointError:
    return damaged(f"the manifest cannot be read: {what}.", where)


def _impossible(where: str, what: str) -> CheckpointError:
    return unsafe(f"the manifest says what cannot be: {what}.", where)
