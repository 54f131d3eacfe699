"""Parameters that were sharded before their unit existed, while the model was being built or initialised."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.errors import UsageError
from shoal.memory.bucket import stand_in

_MAX_WHOLE_NUMEL = 1 << 26  # parameters that were touched again and are whole, together
_MAX_WHOLE = 32
_CHUNK_NBYTES = 1 << 24


class ChunkedTransfer:
    """Moves parameters between whole tensors and the ranks' shards, a chunk at a time.

    Memory: one buffer for what peers read of this rank, as large as the largest parameter, up to ``_CHUNK_NBYTES``. It
        is used again each time, because shared pages that a peer has read once count as resident there for good.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.free()

    def free(self) -> None:
        """Free the buffer; the next move allocates another."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _chunk(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = min(numel * dtype.itemsize, _CHUNK_NBYTES)
        if self._buffer.numel() < nbytes:
            self._buffer = self.comm.empty(nbytes, torch.uint8, self.device)
        return self._buffer[:nbytes].view(dtype)

    def shard(self, value: torch.Tensor, source: int, shard: torch.Tensor) -> None:
        """Fill ``shard`` with this rank's range of rank ``source``'s value. Communicates: broadcasts."""
        begin = self.comm.rank * shard.numel()
        for start, chunk in self._broadcast(value.reshape(-1), source, shard.dtype, "zero.Init"):
            low, high = max(start, begin), min(start + chunk.numel(), begin + shard.numel())
            if low < high:
                shard[low - begin : high - begin].copy_(chunk[low - start : high - start])

    def broadcast(self, flat: torch.Tensor, label: str) -> None:
        """Give rank 0's values of a 1-D tensor to all ranks. Communicates: broadcasts."""
        for start, chunk in self._broadcast(flat, 0, flat.dtype, label):
            flat[start : start + chunk.numel()].copy_(chunk)

    def _broadcast(
        self, flat: torch.Tensor, source: int, dtype: torch.dtype, label: str
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each chunk begins, and rank ``source``'s values of it."""
        buffer = self._chunk(flat.numel(), dtype)
        for start in range(0, flat.numel(), buffer.numel() or 1):
            values = flat[start : start + buffer.numel()]
            chunk = buffer[: values.numel()].copy_(values)
            if self.comm.size > 1:
                self.comm.broadcast(chunk, source, label=label).drain()
            yield start, chunk

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
                own = flat[begin : begin + numel]  # the last ranks' may be shorter: the rest is padding
                own.copy_(part[: own.numel()])


class EarlyShard:
    """This rank's range of one parameter.

    Args:
        home: where the shard is kept; None: on the device.

    Memory: numel / N elements, until the parameter's unit is built.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        transfer: ChunkedTransfer,
        dtype: torch.dtype | None,
        home: torch.device | None = None,
    ) -> None:
        self.transfer, self.device, self.home = transfer, transfer.device, home
        self.number = 0  # parameters are gathered in its order, the same on every rank
        self.holders: list[int | None] = []  # of the blocks that hold it whole: which rank's changes count in each
        self.is_touched = False  # whole, because code used it
        self.is_watched = False  # changes that would be lost are an error
        self._take(parameter, 0, dtype)

    def _take(self, parameter: torch.Tensor, source: int, dtype: torch.dtype | None) -> None:
        value = parameter.detach()
        dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
        self.shape, self.numel, self.dtype = value.shape, value.numel(), dtype
        self._keep(value, source)
        parameter.data = stand_in(tuple(self.shape), dtype, self.device)

    def _keep(self, value: torch.Tensor, source: int) -> None:
        """Keep this rank's range of rank ``source``'s value."""
        shard = torch.zeros(-(-self.numel // self.comm.size), dtype=self.dtype, device=self.home or self.device)
        self.transfer.shard(value, source, shard)
        self.shard = shard

    @property
    def comm(self) -> Communicator:
        """The ranks that have the other ranges."""
        return self.transfer.comm

    def whole(self) -> torch.Tensor:
        """The parameter's value. Communicates as ``copy_to``."""
        value = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.copy_to(value)
        return value

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the parameter's value to ``target``, a contiguous tensor of its shape, of any dtype. Communicates."""
        self.transfer.gather(self.shard, target)

    def gather(self, parameter: torch.Tensor) -> None:
        """Make the parameter whole."""
        parameter.data = self.whole()

    def write(self, parameter: torch.Tensor, source: int) -> None:
        """Keep this rank's range of the parameter as rank ``source`` has it; it stays whole here."""
        value = parameter.data
        if tuple(value.shape) != tuple(self.shape):  # code has put another tensor in its place
            self.shape, self.numel = value.shape, value.numel()
        self._keep(value, source)

    def scatter(self, parameter: torch.Tensor, source: int | None) -> None:
        """Keep this rank's range of the parameter, as rank ``source`` has it (None: as it was)."""
        if source is not None:
            self.write(parameter, source)
        parameter.data = stand_in(tuple(self.shape), self.dtype, self.device)

    # blocks that hold it whole

    def hold(self, parameter: torch.Tensor, source: int | None) -> None:
        """A block begins in which the parameter is whole, and at whose end rank ``source``'s changes count.

        A block inside another gathers nothing, so that one rank alone may open it.
        """
        if not self.holders:
            if self.is_touched:
                self.is_touched = False
                self.write(parameter, 0)
            else:
                self.gather(parameter)
        self.holders.append(source)

    def let_go(self, parameter: torch.Tensor, source: int | None, *, is_kept: bool) -> None:
        """The innermost block ends. Within a block that keeps changes itself, that one does it.

        Args:
            is_kept: no exception ended it.
        """
        self.holders.pop()
        counts = source if is_kept else None
        if not self.holders:
            self.scatter(parameter, counts)
        elif counts is not None and all(outer is None for outer in self.holders):
            self.write(parameter, counts)


class _Registry:
    """Early shards by parameter. Entries go with their parameter."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], EarlyShard]] = {}
        self._numbers = itertools.count()

    def get(self, parameter: torch.Tensor) -> EarlyShard | None:
        entry = self._by_id.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def put(self, parameter: torch.Tensor, shard: EarlyShard) -> None:
        key = id(parameter)
        shard.number = next(self._numbers)
        self._by_id[key] = (weakref.ref(parameter, lambda _: self._by_id.pop(key, None)), shard)
        vars(parameter)["__deepcopy__"] = _WholeCopy(parameter)

    def pop(self, parameter: torch.Tensor) -> None:
        if self._by_id.pop(id(parameter), None) is not None:
            vars(parameter).pop("__deepcopy__", None)


EARLY = _Registry()


class _WholeCopy:
    """``copy.deepcopy()`` of an early shard's parameter: whole, nobody's shard. A copy of the stand-in would be NaN.

    PEFT copies modules as it wraps them (``modules_to_save``), and gathers only parameters that show no elements.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, memo: dict[int, Any]) -> torch.Tensor:
        """The copy. Communicates: one all_gather, on every rank, unless the parameter is whole now."""
        parameter = self._parameter()
        assert parameter is not None
        early = EARLY.get(parameter)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if early is None or early.holders or early.is_touched:
                value = parameter.detach().clone()
            else:
                value = early.whole().clone()
        copied = nn.Parameter(value, parameter.requires_grad)
        memo[id(parameter)] = copied
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Raises: UsageError: the parameter is pickled, of which the stand-in's NaN would be kept."""
        raise UsageError(
            "a parameter that zero.Init has sharded cannot be pickled: it would be NaN where it is read.",
            do="pickle tensors: those of engine.module_state_dict(), or copies made inside"
            " `with shoal.zero.GatheredParameters(model.parameters()):`, on every rank.",
            code="copy-at-rest",
        )


class EarlyShards:
    """Shards parameters as they are made, and makes whole what code touches again.

    Args:
        dtype: floating-point parameters are cast to it; None: kept.
        before_scatter: called with a parameter that was touched, while it is whole for the last time.
        home: where shards rest; None: on ``device``.
        is_watched: changes in a block of ``GatheredParameters`` that would lose them are an error.

    Memory: the shards; up to 2^26 elements of parameters that were touched since the last ``scatter``.
    """

    def __init__(
        self,
        transfer: ChunkedTransfer,
        dtype: torch.dtype | None = None,
        before_scatter: Callable[[nn.Parameter], None] | None = None,
        home: torch.device | None = None,
        *,
        is_watched: bool = False,
    ) -> None:
        self._transfer = transfer
        self._home = home
        self._is_watched = is_watched
        self._dtype = dtype
        self._before_scatter = before_scatter
        self._whole: dict[int, nn.Parameter] = {}

    def shard(self, parameter: nn.Parameter) -> None:
        """Cut a parameter down to this rank's range. Communicates: one broadcast of it."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if EARLY.get(parameter) is None and not parameter.is_meta:
                early = EarlyShard(parameter, self._transfer, self._dtype, self._home)
                early.is_watched = self._is_watched
                EARLY.put(parameter, early)

    def touch(self, parameter: nn.Parameter) -> None:
        """Make a sharded parameter whole, because code is about to use it. Communicates: one all_gather of it."""
        early = EARLY.get(parameter)
        if early is None or early.is_touched or early.holders:
            return
        held = sum(p.numel() for p in self._whole.values())
        if held + parameter.numel() > _MAX_WHOLE_NUMEL or len(self._whole) >= _MAX_WHOLE:
            self.scatter()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            early.gather(parameter)
        early.is_touched = True
        self._whole[id(parameter)] = parameter

    def scatter(self) -> None:
        """Shard what was touched. Rank 0's values count. Communicates: one broadcast of each."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in self._whole.values():
                early = EARLY.get(parameter)
                if early is not None and early.is_touched:
                    early.is_touched = False
                    if self._before_scatter is not None:
                        self._before_scatter(parameter)
                    early.scatter(parameter, source=0)
        self._whole.clear()
