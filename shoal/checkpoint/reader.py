"""Reads tensors of a checkpoint: whole, or the ranges of this rank, whatever the rectangles in which they were saved.

A load is planned first (which bytes of which file go where). Then every rank checks all blocks of its plan. The running
state changes only after no rank has found a damaged block.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shoal.checkpoint.blocks import BlockReader
from shoal.checkpoint.local_shards import LocalShard
from shoal.checkpoint.manifest import Manifest, TensorRecord
from shoal.checkpoint.problems import damaged
from shoal.checkpoint.rectangles import Rectangle
from shoal.checkpoint.storage import Storage
from shoal.checkpoint.tree import dtype_of
from shoal.comm.environment import is_first_process
from shoal.errors import CheckpointError
from shoal.sharding.layout import ParameterSpec
from shoal.text import listed

T = TypeVar("T")

_EVERY_SECONDS = 10.0

logger = logging.getLogger("shoal")


def reported(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, and from time to time a line on how many are done: ``reading model.safetensors: 120 of 300``."""
    said = time.monotonic()
    for number, item in enumerate(items):
        yield item
        if time.monotonic() - said >= _EVERY_SECONDS:
            said = time.monotonic()
            if is_first_process():
                logger.info("%s: %d of %d", what, number + 1, len(items))


@dataclass(frozen=True)
class RangeCopy:
    """Contiguous bytes of a file that are copied into contiguous elements."""

    offset: int
    numel: int
    dtype: torch.dtype
    shard: LocalShard  # whose elements from ``begin`` on they become, in its own dtype and on its device
    begin: int  # in the flattened parameter

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class StateReader(Protocol):
    """A state that ranges of tensors are read from, and the manifest that describes it."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def notes(self) -> Sequence[str]:
        """What was found and cannot be loaded, a sentence each."""
        ...

    def plan(self, shards: Iterable[LocalShard]) -> Any:
        """Which bytes are copied into the shards."""
        ...

    def check(self, plan: Any) -> None:
        """Raises: CheckpointError: something of it is damaged."""
        ...

    def run(self, plan: Any) -> None:
        """Fill them. Raises: CheckpointError."""
        ...

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """One tensor, whole, on the host. Raises: CheckpointError: there is none, or it is damaged."""
        ...


class CheckpointReader:
    """One committed checkpoint.

    Args:
        is_checked: compare the sums of the blocks.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, *, is_checked: bool = True) -> None:
        self.storage = storage
        self.folder = folder
        self.manifest = manifest
        self.notes: Sequence[str] = ()
        self._is_checked = is_checked

    def where(self, file: int) -> str:
        return f"checkpoint {self.folder or '.'} in {self.storage.url}, file {self.manifest.files[file].name}"

    @contextmanager
    def _open(self, file: int) -> Iterator[BlockReader]:
        record = self.manifest.files[file]
        try:
            with self.storage.open(f"{self.folder}/{record.name}" if self.folder else record.name) as opened:
                yield BlockReader(opened, record, self.where(file), is_checked=self._is_checked)
        except OSError as error:
            raise damaged(f"{record.name} cannot be opened: {error}.", self.where(file)) from error

    # plans

    def plan(self, shards: Iterable[LocalShard]) -> dict[int, list[RangeCopy]]:
        """The copies that fill the shards, by file, in the order in which they lie there."""
        copies: dict[int, list[RangeCopy]] = defaultdict(list)
        for shard in shards:
            record = self.manifest.find(shard.kind, shard.name)
            if record is None:
                continue  # the caller has compared the names before
            for file, copy in self._copies(record, shard):
                copies[file].append(copy)
        for entries in copies.values():
            entries.sort(key=lambda copy: copy.offset)
        return dict(copies)

    def _copies(self, record: TensorRecord, shard: LocalShard) -> Iterator[tuple[int, RangeCopy]]:
        dtype = dtype_of(record.dtype)
        for wanted_begin, wanted in shard.rectangles():
            for file, offset, start, shape in record.chunks:
                saved = Rectangle(start, shape)
                common = saved.meet(wanted)
                if common is None:
                    continue
                # The common elements are several runs in each; the runs need not have the same lengths.
                sources = list(saved.runs_of(common))
                targets = list(wanted.runs_of(common))
                for source, target, numel in _paired(sources, targets):
                    begin = wanted_begin + target
                    yield file, RangeCopy(offset + source * dtype.itemsize, numel, dtype, shard, begin)

    # bytes

    def check(self, plan: dict[int, list[RangeCopy]]) -> None:
        """Read every block that the plan needs and compare its checksum.

        Raises: CheckpointError: a block is damaged; it names the file, the bytes, and the tensors in them.
        Memory: one block.
        """
        for file, copies in plan.items():
            what = f"checking blocks of {self.manifest.files[file].name}"
            self.check_file(file, reported(self._blocks(file, copies), what))

    def check_file(self, file: int, blocks: Iterable[int] | None = None) -> None:
        """Read blocks of a file (None: all) and compare their sums. Raises: CheckpointError."""
        with self._open(file) as reader:
            for number in range(len(self.manifest.files[file].blocks)) if blocks is None else blocks:
                try:
                    reader.block(number)
                except CheckpointError as error:
                    raise self._with_tensors(error, file, number) from error

    def _blocks(self, file: int, copies: list[RangeCopy]) -> list[int]:
        size = self.manifest.files[file].block_nbytes
        numbers: set[int] = set()
        for copy in copies:
            if copy.nbytes:
                numbers.update(range(copy.offset // size, (copy.offset + copy.nbytes - 1) // size + 1))
        return sorted(numbers)

    def _with_tensors(self, error: CheckpointError, file: int, number: int) -> CheckpointError:
        size = self.manifest.files[file].block_nbytes
        names = []
        for tensor in self.manifest.tensors:
            itemsize = dtype_of(tensor.dtype).itemsize
            for index, offset, start, shape in tensor.chunks:
                end = offset + math.prod(shape) * itemsize
                if index == file and offset < (number + 1) * size and end > number * size:
                    place = ", ".join(f"{s}:{s + n}" for s, n in zip(start, shape, strict=True))
                    names.append(f"{tensor.kind} {tensor.name!r}[{place}]")
        return damaged(f"{error.what} In them lie: {listed(names, 4) or 'no tensors (the header)'}.", error.where)

    @torch.no_grad()
    def run(self, plan: dict[int, list[RangeCopy]]) -> None:
        """Do the copies. Raises: CheckpointError. Memory: one block."""
        for file, copies in plan.items():
            with self._open(file) as reader:
                for copy in reported(copies, f"reading parts of {self.manifest.files[file].name}"):
                    at = copy.begin
                    for view in reader.parts(copy.offset, copy.nbytes):
                        values = torch.frombuffer(view, dtype=copy.dtype)
                        for target in copy.shard.part(at, at + values.numel()):
                            target.copy_(values[: target.numel()])
                            values = values[target.numel() :]
                            at += target.numel()

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """One tensor, whole, on the host. Raises: CheckpointError: there is none, or it is damaged."""
        record = self.manifest.find(kind, name)
        if record is None:
            where = f"checkpoint {self.folder} in {self.storage.url}"
            raise damaged(f"the checkpoint has no tensor {name!r} of kind {kind!r}.", where)
        flat = torch.empty(record.numel, dtype=dtype_of(record.dtype), device="cpu")
        self.run(self.plan([LocalShard(kind, ParameterSpec.whole(name, record.shape), 0, (flat,))]))
        return flat.view(record.shape)


def _paired(sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Split the same elements at the ends of both lists of runs: (source begin, target begin, numel)."""
    i = j = done_i = done_j = 0
    while i < len(sources) and j < len(targets):
        numel = min(sources[i][1] - done_i, targets[j][1] - done_j)
        yield sources[i][0] + done_i, targets[j][0] + done_j, numel
        done_i, done_j = done_i + numel, done_j + numel
        if done_i == sources[i][1]:
            i, done_i = i + 1, 0
        if done_j == targets[j][1]:
            j, done_j = j + 1, 0
