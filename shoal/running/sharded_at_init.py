"""Parameters that are sharded one by one, before an engine has units: under ``zero.Init``, or from the meta device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.comm.protocol import Communicator
from shoal.errors import UsageError
from shoal.running.parameter_owner import OWNERS, ParameterOwner, ParameterState
from shoal.sharding.layout import ParameterSpec
from shoal.sharding.parts import take
from shoal.sharding.storage import placeholder
from shoal.sharding.unit import Unit

_MAX_ACCESSED_NUMEL = 1 << 26  # of parameters that stay gathered after an access, together
_MAX_ACCESSED = 32
_CHUNK_NBYTES = 1 << 24


class ChunkedTransfer:
    """Copies parameters between whole tensors and the ranks' shards, a chunk at a time.

    Memory: one buffer for what peers read of this rank, as large as the largest parameter, up to ``_CHUNK_NBYTES``. It
        is reused for each chunk: shared pages that a peer has read once count as resident in the peer from then on.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.free()

    def free(self) -> None:
        """Free the buffer; the next copy allocates another."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def shard(self, value: torch.Tensor, source: int, shard: torch.Tensor) -> None:
        """Fill ``shard`` with this rank's range of rank ``source``'s value. Communicates: broadcasts."""
        begin = self.comm.rank * shard.numel()
        for start, chunk in self._broadcast(value.reshape(-1), source, shard.dtype, "zero.Init"):
            low, high = max(start, begin), min(start + chunk.numel(), begin + shard.numel())
            if low < high:
                shard[low - begin : high - begin].copy_(chunk[low - start : high - start])

    def gather(self, shard: torch.Tensor, target: torch.Tensor) -> None:
        """Fill ``target``, contiguous, with the ranks' shards. Communicates: all_gathers."""
        flat, size = target.view(-1), self.comm.size
        buffer = self._chunk(shard.numel() * size, shard.dtype)
        most = buffer.numel() // size
        for start in range(0, shard.numel(), most or 1):
            numel = min(most, shard.numel() - start)
            parts = buffer[: size * numel].view(size, numel)
            parts[self.comm.rank].copy_(shard[start : start + numel])
            self.comm.all_gather(parts.view(-1), label="zero.Init").drain()
            for rank, part in enumerate(parts):
                begin = rank * shard.numel() + start
                target_part = flat[begin : begin + numel]  # shorter than the part where that ends in padding
                target_part.copy_(part[: target_part.numel()])

    def broadcast(self, flat: torch.Tensor, label: str) -> None:
        """Set a 1-D tensor to rank 0's values. Communicates: broadcasts."""
        if not self.comm.backend.carries_values:
            return
        for start, chunk in self._broadcast(flat, 0, flat.dtype, label):
            flat[start : start + chunk.numel()].copy_(chunk)

    def _broadcast(
        self, flat: torch.Tensor, source: int, dtype: torch.dtype, label: str
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Rank ``source``'s values of each chunk, with the index of the chunk's first element."""
        buffer = self._chunk(flat.numel(), dtype)
        for start in range(0, flat.numel(), buffer.numel() or 1):
            values = flat[start : start + buffer.numel()]
            chunk = buffer[: values.numel()].copy_(values)
            if self.comm.size > 1:
                self.comm.broadcast(chunk, source, label=label).drain()
            yield start, chunk

    def _chunk(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = min(numel * dtype.itemsize, _CHUNK_NBYTES)
        if self._buffer.numel() < nbytes:
            self._buffer = self.comm.empty(nbytes, torch.uint8, self.device)
        return self._buffer[:nbytes].view(dtype)


@dataclass
class _Record:
    """What this rank holds of one parameter."""

    number: int
    shape: torch.Size
    shard: torch.Tensor  # [ceil(numel / N)]
    num_blocks: int = 0  # open ``gathered`` blocks
    is_accessed: bool = False  # gathered because code used it; rank 0's changes will be kept

    @property
    def is_gathered(self) -> bool:
        return self.is_accessed or self.num_blocks > 0


class ShardedAtInit(ParameterOwner):
    """The owner of parameters that are sharded before ``initialize``. Each of them keeps it alive.

    Args:
        dtype: floating-point parameters are cast to it; None: kept.
        before_release: called with a parameter that code has accessed, just before it is sharded again.
        shard_device: where shards are kept; None: on the device of the parameters.
        checks_changes: as ``ParameterOwner``'s.

    Memory: numel / N elements of each parameter, until its unit is built; and up to 2^26 elements of parameters that
        were accessed since the last ``release_accessed``.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self,
        transfer: ChunkedTransfer,
        dtype: torch.dtype | None = None,
        before_release: Callable[[nn.Parameter], None] | None = None,
        shard_device: torch.device | None = None,
        *,
        checks_changes: bool = False,
    ) -> None:
        super().__init__(transfer.comm, 3, checks_changes=checks_changes)
        self.transfer = transfer
        self.shard_device = shard_device
        self._dtype = dtype
        self._before_release = before_release
        self._records = WeakTensorKeyDictionary()
        self._accessed: dict[int, nn.Parameter] = {}

    def shard(self, parameter: nn.Parameter) -> None:
        """Keep this rank's shard of rank 0's value; free the rest. Communicates: a broadcast of the parameter."""
        if parameter.is_meta or isinstance(OWNERS.get(parameter), ShardedAtInit):
            return
        dtype = self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._records[parameter] = _Record(next(self._numbers), parameter.shape, self._shard(parameter, 0, dtype))
            self._put_placeholder(parameter)
        OWNERS.put(parameter, self)
        vars(parameter)["__deepcopy__"] = _GatheredCopy(parameter, self)

    def _shard(self, parameter: torch.Tensor, source: int, dtype: torch.dtype) -> torch.Tensor:
        length = -(-parameter.numel() // self.comm.size)
        shard = torch.zeros(length, dtype=dtype, device=self.shard_device or self.transfer.device)
        self.transfer.shard(parameter.detach(), source, shard)
        return shard

    def _put_placeholder(self, parameter: torch.Tensor) -> None:
        record = self._record(parameter)
        parameter.data = placeholder(tuple(record.shape), record.shard.dtype, self.transfer.device)

    def _record(self, parameter: torch.Tensor) -> _Record:
        record: _Record = self._records[parameter]
        return record

    def hand_over(self, parameter: torch.Tensor, target: torch.Tensor, part: ParameterSpec | None) -> None:
        """Copy the value to ``target``, contiguous and of any dtype, and free the shard.

        Args:
            part: which elements; None: all. The value may have been cut already along some dims.

        Communicates: all_gathers.
        Memory: for a part, the whole value.
        """
        record = self._record(parameter)
        if part is None or tuple(record.shape) == part.shape:
            self.transfer.gather(record.shard, target)
        else:
            value = self.whole(parameter)
            for dim, ranges in enumerate(part.local):
                if value.shape[dim] != part.shape[dim]:
                    value = take(value, dim, ranges)
            target.copy_(value)
        self.give_up(parameter)

    def give_up(self, parameter: torch.Tensor) -> None:
        """Free the shard; the parameter has no owner afterwards."""
        del self._records[parameter]
        OWNERS.pop(parameter, self)
        vars(parameter).pop("__deepcopy__", None)

    # accesses while a model is built

    def gather_accessed(self, parameter: nn.Parameter) -> None:
        """Gather a parameter that is sharded at init and that code is about to use. Communicates: all_gathers."""
        owner = OWNERS.get(parameter)  # or another one, of a context around this one
        if not isinstance(owner, ShardedAtInit) or owner.state_of(parameter) == "gathered":
            return
        numel = sum(p.numel() for p in self._accessed.values())
        if numel + parameter.numel() > _MAX_ACCESSED_NUMEL or len(self._accessed) >= _MAX_ACCESSED:
            self.release_accessed()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            parameter.data = owner.whole(parameter)
        owner._record(parameter).is_accessed = True
        self._accessed[id(parameter)] = parameter

    def release_accessed(self) -> None:
        """Shard what code has accessed. Rank 0's values are kept. Communicates: a broadcast of each parameter."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in self._accessed.values():
                owner = OWNERS.get(parameter)
                if not isinstance(owner, ShardedAtInit) or not owner._record(parameter).is_accessed:
                    continue
                if self._before_release is not None:
                    self._before_release(parameter)
                owner.write_through(parameter, 0)
                owner._record(parameter).is_accessed = False
                owner._put_placeholder(parameter)
        self._accessed.clear()

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the value that the shards hold. Communicates: all_gathers."""
        record = self._record(parameter)
        value = torch.empty(record.shape, dtype=record.shard.dtype, device=self.transfer.device)
        self.transfer.gather(record.shard, value)
        return value

    # the same for every owner

    @contextmanager
    def _resident(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in parameters:
                record = self._record(parameter)
                if record.is_accessed:
                    record.is_accessed = False
                    self.write_through(parameter, 0)
                elif not record.num_blocks:
                    parameter.data = self.whole(parameter)
                record.num_blocks += 1
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for parameter in parameters:
                    record = self._records.get(parameter)
                    if record is None:  # an engine has taken it over inside the block
                        continue
                    record.num_blocks -= 1
                    if not record.num_blocks:
                        self._put_placeholder(parameter)

    def write_through(self, parameter: torch.Tensor, source: int) -> None:
        record = self._records.get(parameter)
        if record is not None:
            record.shape = parameter.shape  # code may have put another tensor in its place
            record.shard = self._shard(parameter, source, record.shard.dtype)

    def number_of(self, parameter: torch.Tensor) -> int:
        return self._record(parameter).number

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        return True

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        return "gathered" if self._record(parameter).is_gathered else "sharded"

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._record(parameter).shard

    def num_shards(self, parameter: torch.Tensor) -> int:
        return self.comm.size

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        """Change the dtype of a sharded parameter."""
        record = self._record(parameter)
        record.shard = record.shard.to(dtype)
        self._put_placeholder(parameter)

    def load(self, parameter: nn.Parameter, read: Callable[[int, int], torch.Tensor]) -> None:
        shard = self.shard_of(parameter)
        begin = min(self.comm.rank * shard.numel(), parameter.numel())
        end = min(begin + shard.numel(), parameter.numel())
        shard[: end - begin].copy_(read(begin, end))

    def share(self, module: nn.Module, parameter: torch.Tensor, *, is_shared: bool) -> None:
        """Nothing: the engine finds such reads in the first pass."""


class _GatheredCopy:
    """``copy.deepcopy()`` of a parameter that is sharded at init: whole, and without an owner.

    A copy of the placeholder would be NaN. PEFT copies modules that it wraps (``modules_to_save``), and gathers only
    parameters that show no elements.
    """

    def __init__(self, parameter: torch.Tensor, owner: ShardedAtInit) -> None:
        self._parameter, self._owner = weakref.ref(parameter), owner

    def __call__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The copy. Communicates: all_gathers, on every rank, unless the parameter is gathered now."""
        parameter = self._parameter()
        assert parameter is not None
        is_gathered = self._owner.state_of(parameter) == "gathered"
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value = parameter.detach().clone() if is_gathered else self._owner.whole(parameter)
        copied = nn.Parameter(value, parameter.requires_grad)
        memo[id(parameter)] = copied
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Raises: UsageError: the parameter is pickled, of which the placeholder's NaN would be kept."""
        raise UsageError(
            "a parameter that zero.Init has sharded cannot be pickled: the pickle would hold NaN.",
            do="pickle tensors: those of engine.module_state_dict(), or copies made inside"
            " `with shoal.zero.GatheredParameters(model.parameters()):`, on every rank.",
            code="copy-at-rest",
        )


def give_back(
    units: Sequence[Unit], sharded_at_init: Collection[int], comm: Communicator, device: torch.device
) -> None:
    """Give the parameters of units memory of their own: whole, or sharded where they came sharded.

    Args:
        sharded_at_init: the ``id`` of parameters that came sharded.

    Communicates: an all-gather per sharded unit; a broadcast of each parameter that came sharded.
    """
    at_init = ShardedAtInit(ChunkedTransfer(comm, device))
    try:
        for unit in units:
            unit.gather(is_exact=True)
            for group in unit.groups:
                group.detach()
            for parameter in unit.parameters:
                if id(parameter) in sharded_at_init:
                    at_init.shard(parameter)
    finally:
        at_init.transfer.free()
