"""Parameters that were sharded before their unit existed, while the model was being built or initialised."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.memory.bucket import stand_in

_MAX_WHOLE_NUMEL = 1 << 26  # parameters that were touched again and are whole, together
_MAX_WHOLE = 32


class EarlyShard:
    """This rank's range of one parameter.

    Memory: numel / N elements, until the parameter's unit is built.
    """

    def __init__(
        self, parameter: torch.Tensor, comm: Communicator, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        value = parameter.detach()
        dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
        self.shape, self.numel, self.dtype = value.shape, value.numel(), dtype
        self._comm, self._device = comm, device
        padded = -(-self.numel // comm.size) * comm.size
        full = torch.zeros(padded, dtype=dtype, device=device)
        full[: self.numel].copy_(value.reshape(-1))
        if comm.size > 1 and padded:
            comm.broadcast(full, 0, label="zero.Init").drain()
        length = padded // comm.size
        self.shard = full[comm.rank * length : (comm.rank + 1) * length].clone()
        parameter.data = stand_in(tuple(self.shape), dtype, device)

    def whole(self) -> torch.Tensor:
        """The parameter's value. Communicates: one all_gather."""
        full = torch.empty(self.shard.numel() * self._comm.size, dtype=self.dtype, device=self._device)
        if full.numel():
            self._comm.all_gather(full, self.shard, label="zero.Init").drain()
        return full[: self.numel].view(self.shape)

    def gather(self, parameter: torch.Tensor) -> None:
        """Make the parameter whole."""
        parameter.data = self.whole()

    def scatter(self, parameter: torch.Tensor, source: int | None) -> None:
        """Keep this rank's range of the parameter, as rank ``source`` has it (None: as it was)."""
        if source is not None:
            flat = torch.zeros(self.shard.numel() * self._comm.size, dtype=self.dtype, device=self._device)
            flat[: self.numel].copy_(parameter.data.reshape(-1))
            if self._comm.size > 1 and flat.numel():
                self._comm.broadcast(flat, source, label="zero.Init").drain()
            length = self.shard.numel()
            self.shard.copy_(flat[self._comm.rank * length : (self._comm.rank + 1) * length])
        parameter.data = stand_in(tuple(self.shape), self.dtype, self._device)


class _Registry:
    """Early shards by parameter. Entries go with their parameter."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], EarlyShard]] = {}

    def get(self, parameter: torch.Tensor) -> EarlyShard | None:
        entry = self._by_id.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def put(self, parameter: torch.Tensor, shard: EarlyShard) -> None:
        key = id(parameter)
        self._by_id[key] = (weakref.ref(parameter, lambda _: self._by_id.pop(key, None)), shard)

    def pop(self, parameter: torch.Tensor) -> None:
        self._by_id.pop(id(parameter), None)


EARLY = _Registry()


class EarlyShards:
    """Shards parameters as they are made, and makes whole what code touches again.

    Args:
        dtype: floating-point parameters are cast to it; None: kept.
        before_scatter: called with a parameter that was touched, while it is whole for the last time.

    Memory: the shards; up to 2^26 elements of parameters that were touched since the last ``scatter``.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        dtype: torch.dtype | None = None,
        before_scatter: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._comm = comm
        self._device = device
        self._dtype = dtype
        self._before_scatter = before_scatter
        self._whole: dict[int, nn.Parameter] = {}

    def shard(self, parameter: nn.Parameter) -> None:
        """Cut a parameter down to this rank's range. Communicates: one broadcast of it."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if EARLY.get(parameter) is None and not parameter.is_meta:
                EARLY.put(parameter, EarlyShard(parameter, self._comm, self._device, self._dtype))

    def touch(self, parameter: nn.Parameter) -> None:
        """Make a sharded parameter whole, because code is about to use it. Communicates: one all_gather of it."""
        early = EARLY.get(parameter)
        if early is None or id(parameter) in self._whole:
            return
        held = sum(p.numel() for p in self._whole.values())
        if held + parameter.numel() > _MAX_WHOLE_NUMEL or len(self._whole) >= _MAX_WHOLE:
            self.scatter()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            early.gather(parameter)
        self._whole[id(parameter)] = parameter

    def scatter(self) -> None:
        """Shard what was touched. Rank 0's values count. Communicates: one broadcast of each."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter in self._whole.values():
                early = EARLY.get(parameter)
                if early is not None:
                    if self._before_scatter is not None:
                        self._before_scatter(parameter)
                    early.scatter(parameter, source=0)
        self._whole.clear()
