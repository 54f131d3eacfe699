"""What is stored on a disk: shards of parameters, read before a use, and the state of the optimizer.

Optimizer state is fetched for a group's update and stored after it, while the next group's is being read.

    step     | group 0    | group 1    | group 2    |
    reads    | 1 ...      | 2 ...      |            |
    updates  | 0          | 1          | 2          |
    writes   |            | 0 ...      | 1 ...      | 2 ...

Between its updates a group's main parameters and optimizer state are placeholders: they show their true size and read
as NaN. Other callers keep them in memory with ``resident``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal.memory.disk_store import DiskBuffer, DiskStore
from shoal.memory.host import PAGE, round_up
from shoal.memory.stream_copies import StreamCopies
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.copied_gather import OffloadedStorage
from shoal.sharding.encoded_state import EncodedState
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.placement import Tier
from shoal.sharding.storage import ByteRanges, ShardStorage, placeholder

MAIN = "master"
_AHEAD = 1  # groups whose state is read before their turn

Field = tuple[str, torch.dtype, int]  # its name, dtype and number of elements


@dataclass(eq=False)
class _Stored:
    """The state of one group: its fields one after the other in one disk buffer."""

    disk: DiskBuffer
    fields: tuple[Field, ...] = ()


class DiskStorage(OffloadedStorage):
    """A shard on a disk. In memory, and zero, until ``unpin()`` is called for the first time."""

    tier = Tier.DISK

    def __init__(
        self, store: DiskStore, label: str, numel: int, dtype: torch.dtype, copies: StreamCopies | None
    ) -> None:
        self._store = store
        self._numel, self._dtype = numel, dtype
        self._nbytes = numel * dtype.itemsize
        self._buffer = store.allocate(label, self._nbytes)
        self._buffer.pin_count = 1
        self._is_changed = False  # since it was read
        super().__init__(self._in_memory(), copies)

    def _in_memory(self) -> torch.Tensor:
        if self._buffer.memory is None:  # this rank owns nothing
            return torch.empty(0, dtype=self._dtype, device="cpu")
        return self._buffer.memory[: self._nbytes].view(self._dtype)

    def start_fetch(self, ranges: ByteRanges | None = None) -> None:
        self._store.start_fetch(self._buffer, ranges)

    def fetch(self, ranges: ByteRanges | None = None) -> None:
        self._store.fetch(self._buffer, ranges)

    def can_fetch_ahead(self) -> bool:
        return self._store.can_fetch_ahead(self._nbytes)

    def pin(self, *, is_overwritten: bool = False, ranges: ByteRanges | None = None) -> None:
        if is_overwritten and not self._buffer.pin_count:
            self._store.zero(self._buffer)
        else:
            self._store.fetch(self._buffer, ranges)
        self._buffer.pin_count += 1
        self.values = self._in_memory()

    def unpin(self, *, is_read_only: bool = False) -> None:
        self._buffer.pin_count -= 1
        self._is_changed |= not is_read_only
        if self._buffer.pin_count:
            return
        self.values = placeholder((self._numel,), self._dtype, torch.device("cpu"))
        is_changed, self._is_changed = self._is_changed, False
        if is_changed:
            self._store.store(self._buffer)
        else:
            self._store.discard(self._buffer)


class _Fetched(ShardStorage):
    """Main parameters on a disk: ``DiskOptimizerState`` fetches them with the group's optimizer state."""

    tier = Tier.DISK


class DiskOptimizerState:
    """The optimizer state of one rank's groups, on a disk.

    Main parameters are stored as their buffer is built (``add``), so that memory never holds all of them; the groups
    come with ``bind``, and their optimizer state group by group in the first step.

    Memory: on the host at most three groups' state: the one that is updated, the next and the last (one more while
    it is written).
    """

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._groups: list[ParameterGroup] = []
        self._index: dict[ParameterGroup, int] = {}
        self._stored: dict[int, _Stored] = {}  # by id of the parameter buffer

    @torch.no_grad()
    def add(self, buffer: FlatBuffer, source: torch.Tensor, dtype: torch.dtype) -> ShardStorage:
        """Begin to store main parameters, of which placeholders are left. Raises: OutOfMemoryError, TierError."""
        fields = ((MAIN, dtype, source.numel()),)
        stored = _Stored(self._store.allocate(buffer.label, _nbytes(fields)), fields)
        assert stored.disk.memory is not None
        _views(fields, stored.disk.memory)[MAIN].copy_(source)
        self._store.store(stored.disk)
        self._stored[id(buffer)] = stored
        return _Fetched(placeholder((source.numel(),), dtype, torch.device("cpu")))

    def bind(self, groups: Sequence[ParameterGroup]) -> None:
        """From now on the state of these groups is stored here. They are updated in this order."""
        self._groups = list(groups)
        self._index = {group: index for index, group in enumerate(self._groups)}
        for group in self._groups:
            self._stored.setdefault(id(group.buffer), _Stored(DiskBuffer(group.label, is_resident=True)))
            group.disk = self
        self._store.synchronize()

    @property
    def host_nbytes(self) -> int:
        """Bytes of memory, in use or kept."""
        return self._store.host_nbytes

    def _stored_of(self, group: ParameterGroup) -> _Stored:
        return self._stored[id(group.buffer)]

    # one group

    def start_fetch(self, group: ParameterGroup) -> None:
        """Begin to read a group's state. Does not block the host."""
        self._store.start_fetch(self._stored_of(group).disk)

    def fetch(self, group: ParameterGroup, *, reads_ahead: bool = False) -> None:
        """Read a group's state into memory, and (in a step) begin to read the next one's.

        Raises: TierError: it could not be read.
        """
        stored = self._stored_of(group)
        if self._store.fetch(stored.disk) and stored.disk.memory is not None:
            self._point(group, _views(stored.fields, stored.disk.memory))
        if reads_ahead:
            following = self._index[group] + 1
            for later in self._groups[following : following + _AHEAD]:
                self.start_fetch(later)

    def store(self, group: ParameterGroup) -> None:
        """Begin to store a group's state; placeholders are left in memory.

        Raises: TierError: an earlier group's could not be stored.
        """
        stored = self._stored_of(group)
        if not stored.disk.is_resident or stored.disk.pin_count:
            return
        old = self._resize(group, stored)
        if stored.disk.extent is not None and stored.disk.memory is not None:
            self._copy_into(group, stored)
            cpu = torch.device("cpu")
            self._point(group, {key: placeholder((numel,), dtype, cpu) for key, dtype, numel in stored.fields})
        if old is not None:
            self._store.release_memory(old)
        self._store.store(stored.disk)

    @contextmanager
    def resident(self, group: ParameterGroup) -> Iterator[None]:
        """Keep a group's state in memory inside the block; changes are stored."""
        disk = self._stored_of(group).disk
        self.fetch(group)
        disk.pin_count += 1
        try:
            yield
        finally:
            disk.pin_count -= 1
            self.store(group)

    def close(self) -> None:
        """Remove the files: the state is gone."""
        self._groups.clear()
        self._stored.clear()
        self._store.close()

    # values

    def _fields_of(self, group: ParameterGroup) -> tuple[Field, ...]:
        fields: dict[str, Field] = {MAIN: (MAIN, group.main.dtype, group.owned_numel)} if group.has_own_main else {}
        for _, key, value, _, stop in _placed(group):
            numel = stop if isinstance(value, EncodedState) else group.owned_numel
            fields[key] = (key, _stored_tensor(value).dtype, numel)
        return tuple(fields.values())

    def _resize(self, group: ParameterGroup, stored: _Stored) -> torch.Tensor | None:
        """Fit the disk buffer to the state: the first step makes optimizer state, a load may change it.

        Returns: the memory in which the values still lie, where that is other memory now.
        """
        fields = self._fields_of(group)
        nbytes = _nbytes(fields)
        if not nbytes or (fields == stored.fields and stored.disk.memory is not None):
            return None
        stored.fields = fields
        return self._store.resize(stored.disk, nbytes)

    def _copy_into(self, group: ParameterGroup, stored: _Stored) -> None:
        assert stored.disk.memory is not None
        views = _views(stored.fields, stored.disk.memory)
        if MAIN in views and not _is_same_range(views[MAIN], group.main):
            views[MAIN].copy_(group.main)
        for _, key, value, start, stop in _placed(group):
            target, source = views[key][start:stop], _stored_tensor(value)
            if not _is_same_range(target, source):
                target.copy_(source)

    def _point(self, group: ParameterGroup, flats: dict[str, torch.Tensor]) -> None:
        if MAIN in flats:
            group.main = flats[MAIN]
        for part in group.ranges if MAIN in flats else ():
            part.param.data = group.main[part.start : part.stop]
        for part, key, value, start, stop in _placed(group):
            if key not in flats:
                continue
            if isinstance(value, EncodedState):
                value.memory = flats[key][start:stop]
            else:
                group.state_of(part)[key] = flats[key][start:stop]


def _placed(group: ParameterGroup) -> Iterator[tuple[ParameterRange, str, torch.Tensor | EncodedState, int, int]]:
    """The states of one element per element, and where each is in its field: an encoded one after that before it."""
    ends: dict[str, int] = {}
    for part, key, value in group.stored_state():
        if isinstance(value, EncodedState):
            start = ends.get(key, 0)
            ends[key] = start + value.nbytes
            yield part, key, value, start, ends[key]
        else:
            yield part, key, value, part.start, part.stop


def _stored_tensor(value: torch.Tensor | EncodedState) -> torch.Tensor:
    return value.memory if isinstance(value, EncodedState) else value


@dataclass
class Disks:
    """What one rank stores on disks."""

    parameters: DiskStore | None = None
    state: DiskOptimizerState | None = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of memory, in use or kept."""
        return sum(store.host_nbytes for store in (self.parameters, self.state) if store is not None)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        for store in (self.parameters, self.state):
            if store is not None:
                store.close()


def _nbytes(fields: Sequence[Field]) -> int:
    return sum(round_up(numel * dtype.itemsize, PAGE) for _, dtype, numel in fields)


def _views(fields: Sequence[Field], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for key, dtype, numel in fields:
        views[key] = memory[at : at + numel * dtype.itemsize].view(dtype)
        at += round_up(numel * dtype.itemsize, PAGE)
    return views


def _is_same_range(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both begin at the same place of one storage. Tensors of a dry run have no addresses."""
    is_same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_same_storage and one.storage_offset() == other.storage_offset()
