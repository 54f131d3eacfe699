"""Files of tensors, written and read in blocks, each with a checksum: a changed byte is an error when it is read.

A file is a safetensors file (a header in JSON, then the tensors' bytes), so any reader of that format opens it. It is
written in one pass; the checksums of its blocks go into the manifest. A block is read whole and checked before any of
its bytes are used.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shoal.checkpoint.element_sums import NOTHING, Sums, element_sums
from shoal.checkpoint.manifest import MAX_SMALL_BLOCK, FileRecord, checksum
from shoal.checkpoint.problems import damaged
from shoal.checkpoint.rectangles import Rectangle
from shoal.checkpoint.storage import Reader, Sink, Storage
from shoal.checkpoint.tree import SAFETENSORS_DTYPES, name_of
from shoal.comm.side_stream import CopyDone
from shoal.errors import CheckpointError
from shoal.memory.stream_copies import copies_of
from shoal.streams import host_mark, is_in_host_memory

MAX_BLOCKS = 1024  # of one file: blocks of a larger one are larger
_GATHER_NBYTES = 1 << 20  # smaller tensors are gathered into one write
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: 1-D parts, one after the other, that together have ``shape``.

    Args:
        read: returns the parts; called when they are written, so that not all of them need be in memory at once.
        is_kept: code that changes the parts calls ``Snapshot.wait`` first, so a snapshot may copy them while training
            continues.
        place: the rectangle that it is of a larger tensor, and that tensor's shape; None: its elements are not summed.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Sequence[torch.Tensor]]
    is_kept: bool = False
    place: tuple[Rectangle, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def sums(self, parts: Sequence[torch.Tensor]) -> Sums:
        """Of its elements, given its parts, as a part of the sums of the larger tensor."""
        if self.place is None:
            return NOTHING
        flat = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return element_sums(flat.detach(), *self.place)


@dataclass(frozen=True)
class FilePlan:
    """A file before it is written: its header, and where each entry will lie."""

    header: bytes
    entries: tuple[TensorEntry, ...]
    offsets: tuple[int, ...]  # from the file's beginning
    nbytes: int
    block_nbytes: int


def plan_file(entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> FilePlan:
    """Lay entries out, the widest dtypes first, so that all are aligned.

    Args:
        metadata: text that the header has in addition to the tensors.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    offsets = []
    for entry in ordered:
        if entry.dtype not in _SAFETENSORS_NAMES:
            dtype = name_of(entry.dtype)
            raise CheckpointError(f"{entry.key!r} has dtype {dtype}, which safetensors does not support.")
        table[entry.key] = {
            "dtype": _SAFETENSORS_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offsets.append(offset)
        offset += entry.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    nbytes = len(header) + offset
    block = MAX_SMALL_BLOCK
    while nbytes > block * MAX_BLOCKS:
        block *= 2
    return FilePlan(header, tuple(ordered), tuple(len(header) + o for o in offsets), nbytes, block)


def write_file(
    storage: Storage,
    folder: str,
    name: str,
    plan: FilePlan,
    before_flush: Callable[[], None] = lambda: None,
    snapshot: Snapshot | None = None,
    between_blocks: Callable[[], None] = lambda: None,
) -> tuple[FileRecord, dict[str, Sums]]:
    """Write a planned file and flush it.

    Args:
        snapshot: the file's bytes, if they were copied before; None: read from the entries.
        between_blocks: called after each block.

    Returns: its record, with the sum of each block; the sums of each entry's elements, by key.
    Raises: OSError: no space, no permission, a broken disk.
    Memory: one block, and on an accelerator's tensors one copy of a block in host memory.
    """
    with storage.create(f"{folder}/{name}" if folder else name, is_direct=snapshot is not None) as sink:
        blocks, sums = write_plan(sink, plan, snapshot, between_blocks)
        before_flush()
        sink.flush()
    return FileRecord(name=name, nbytes=plan.nbytes, block_nbytes=plan.block_nbytes, blocks=blocks), sums


def write_plan(
    sink: Sink, plan: FilePlan, snapshot: Snapshot | None = None, between_blocks: Callable[[], None] = lambda: None
) -> tuple[list[str], dict[str, Sums]]:
    """Write a planned file's bytes, as ``write_file``. Returns: the sum of each block, and the sums of each entry."""
    sums: dict[str, Sums] = {}
    writer = _BlockWriter(sink, plan.block_nbytes, between_blocks)
    if snapshot is not None:
        writer.add(_view_of(snapshot.image))
        for entry, offset in zip(plan.entries, plan.offsets, strict=True):
            sums[entry.key] = entry.sums([snapshot.image[offset : offset + entry.nbytes].view(entry.dtype)])
            between_blocks()
    else:
        writer.add(memoryview(plan.header))
        for entry in plan.entries:
            parts = entry.read()
            sums[entry.key] = entry.sums(parts)
            writer.add_parts(parts)
    writer.finish()
    assert writer.nbytes == plan.nbytes, f"{writer.nbytes} bytes were written of {plan.nbytes}"
    return writer.sums, sums


class Snapshot:
    """A planned file's bytes in host memory, as they are at the call.

    What the user's code can change is copied when this returns. What is kept (``TensorEntry.is_kept``) may be copied
    while training continues: by ``finish()``, on the writing thread, or by an accelerator on a copy stream.

    Order: blocks the host until the parts that are not kept are copied.
    """

    def __init__(self, plan: FilePlan, host_memory: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self.image = host_memory(plan.nbytes)[: plan.nbytes]
        self.image[: len(plan.header)].copy_(torch.frombuffer(bytearray(plan.header), dtype=torch.uint8))
        self._copies = copies_of(device)
        self._rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._done = CopyDone()
        self._is_taken = threading.Event()
        self._see_taken: Callable[[], None] = lambda: None  # called by a thread that has waited for it
        try:
            self._begin(plan)
        except BaseException:
            self._done.block()  # the image's memory may be used again
            raise
        self._has_rest = bool(self._rest)

    def _begin(self, plan: FilePlan) -> None:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry, offset in zip(plan.entries, plan.offsets, strict=True):
            at = offset
            for part in entry.read():
                flat = part.detach().reshape(-1)
                target = self.image[at : at + flat.nbytes].view(entry.dtype)
                at += flat.nbytes
                if entry.is_kept:
                    kept.append((flat, target))
                else:
                    self._copy(flat, target)
        self._done.block()
        for flat, target in kept:
            if is_in_host_memory(flat):
                self._rest.append((flat, target))
            else:
                self._copy(flat, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if is_in_host_memory(source) or self._copies is None:
            target.copy_(source)
        else:
            self._done = self._copies.copy(source, target, is_source_freed=True)  # what was decoded to be saved

    def finish(self) -> None:
        """Copy the rest. Order: complete when it returns."""
        try:
            for source, target in self._rest:
                target.copy_(source)
            self._done.block()
        finally:
            self._rest.clear()
            self._see_taken = host_mark()
            self._is_taken.set()

    def wait(self) -> None:
        """Call before kept parts are changed. Order: blocks the host until host memory is copied; the current stream
        waits for copies of device memory.
        """
        self._done.wait()
        if self._has_rest:
            self._is_taken.wait()
            self._see_taken()


class _BlockWriter:
    """Computes the checksums of blocks as they are written, and joins small parts into larger writes."""

    def __init__(self, sink: Sink, block_nbytes: int, between_blocks: Callable[[], None]) -> None:
        self._sink = sink
        self._block = block_nbytes
        self._between_blocks = between_blocks
        self._sum = xxhash.xxh3_64()
        self._in_block = 0
        self._small = bytearray()
        self.sums: list[str] = []
        self.nbytes = 0

    def add_parts(self, parts: Sequence[torch.Tensor]) -> None:
        """Write an entry's parts. Keeps no reference to them."""
        for tensor in parts:
            for data in _bytes_of(tensor):
                self.add(data)

    def add(self, data: memoryview) -> None:
        while data:
            part = data[: self._block - self._in_block]
            self._sum.update(part)
            if len(part) < _GATHER_NBYTES:
                self._small += part
                if len(self._small) >= _GATHER_NBYTES:
                    self._pass_on()
            else:
                self._pass_on()
                self._sink.write(part)
            self.nbytes += len(part)
            self._in_block += len(part)
            if self._in_block == self._block:
                self._end_block()
            data = data[len(part) :]

    def _pass_on(self) -> None:
        if self._small:
            self._sink.write(memoryview(self._small))
            self._small = bytearray()

    def _end_block(self) -> None:
        self.sums.append(self._sum.hexdigest())
        self._sum = xxhash.xxh3_64()
        self._in_block = 0
        self._between_blocks()

    def finish(self) -> None:
        self._pass_on()
        if self._in_block:
            self._end_block()


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A 1-D tensor's bytes; of one on an accelerator, copied to the host block by block."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return
    if is_in_host_memory(flat):
        yield _view_of(flat.contiguous())
        return
    for part in flat.split(max(MAX_SMALL_BLOCK // flat.element_size(), 1)):
        yield _view_of(part.cpu())


def _view_of(flat: torch.Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


class BlockReader:
    """Reads ranges of one recorded file, block by block, in ascending order, each block checked. Memory: one block."""

    def __init__(self, file: Reader, record: FileRecord, where: str, *, is_checked: bool = True) -> None:
        self._file = file
        self._record = record
        self._where = where
        self._is_checked = is_checked
        self._held = -1
        if file.nbytes != record.nbytes:
            raise damaged(f"{record.name} has {file.nbytes} bytes, and {record.nbytes} were written.", where)
        self._buffer = bytearray(min(record.block_nbytes, record.nbytes))

    def block(self, number: int) -> memoryview:
        """One block's bytes, valid until the next call.

        Raises: CheckpointError: they are not what was written, or cannot be read.
        """
        record = self._record
        begin = number * record.block_nbytes
        length = min(record.block_nbytes, record.nbytes - begin)
        view = memoryview(self._buffer)[:length]
        if self._held == number:
            return view
        self._held = -1
        try:
            self._file.read_into(begin, view)
        except OSError as error:
            what = f"bytes {begin} to {begin + length} of {record.name} cannot be read: {error}."
            raise damaged(what, self._where) from error
        if self._is_checked and (actual := checksum(view)) != record.blocks[number]:
            raise damaged(
                f"bytes {begin} to {begin + length} of {record.name} were changed after they were written:"
                f" their xxh3 sum is {actual}, and {record.blocks[number]} was written.",
                self._where,
            )
        self._held = number
        return view

    def parts(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes ``[offset, offset + nbytes)`` in parts, each valid until the next is asked for."""
        end = offset + nbytes
        while offset < end:
            number, inside = divmod(offset, self._record.block_nbytes)
            view = self.block(number)[inside : inside + end - offset]
            yield view
            offset += len(view)
