"""Parameters that were sharded before their unit existed, while the model was being built (``zero.Init``)."""

from __future__ import annotations

import weakref

import torch

from shoal.comm.protocol import Communicator
from shoal.memory.bucket import stand_in


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
