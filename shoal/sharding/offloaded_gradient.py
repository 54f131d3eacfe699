"""A gradient whose sum is on the host between its reductions; the device has memory of it only for a moment.

The next micro-batch is reduced into a *part* on the device, which the host adds. Every other access fetches the sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any, ClassVar, Protocol

import torch

from shoal.comm.side_stream import CopyDone
from shoal.device import read_vector
from shoal.sharding.gradient import Gradient, GradientState
from shoal.sharding.gradient_norm import sums_of_squares

MAX_SHARDS = 2  # of one size: while one is copied to the host, the next is reduced into; over ranks, two are


class HostGradient(Protocol):
    """The sum on the host."""

    def values(self) -> torch.Tensor:
        """Order: blocks the host until all copies and additions are done. Shape: [owned numel]."""
        ...

    def sum_of_squares(self) -> torch.Tensor:
        """Of the values, on the host. Order: as ``values``. Shape: []."""
        ...


class ShardBuffers:
    """Device memory for reduced gradients that are stored on the host.

    Memory: until ``clear()``, of each size and dtype ``max_shards`` buffers, or as many as were in use at once.
    """

    def __init__(self, device: torch.device, max_shards: int = MAX_SHARDS) -> None:
        self._device = device
        self._max_shards = max_shards
        self._free: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, CopyDone]]] = defaultdict(deque)
        self._num_made: Counter[tuple[int, torch.dtype]] = Counter()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of arbitrary values. Order: the current stream waits for the copy of the values before."""
        free = self._free[numel, dtype]
        if free and self._num_made[numel, dtype] >= self._max_shards:
            flat, copied = free.popleft()
            copied.wait()
            return flat
        self._num_made[numel, dtype] += 1
        return torch.empty(numel, dtype=dtype, device=self._device)

    def release(self, flat: torch.Tensor, copied: CopyDone) -> None:
        """Return a buffer, from which ``copied`` is the last copy."""
        self._free[flat.numel(), flat.dtype].append((flat, copied))

    def discard(self, flat: torch.Tensor) -> None:
        """Drop a buffer: what reads it may not be known."""
        self._num_made[flat.numel(), flat.dtype] -= 1

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(numel * dtype.itemsize * number for (numel, dtype), number in self._num_made.items())

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        for key, free in self._free.items():
            self._num_made[key] -= len(free)
        self._free.clear()


class OffloadedGradient(Gradient):
    """The gradient of a group whose sum is a range and moves to the host whenever it was reduced into.

    Args:
        shards: what the device's memory of it is taken from.

    Memory: on the device a buffer that groups share, from a reduction until it has been copied to the host.
    """

    moves_to_host: ClassVar[bool] = True

    def __init__(self, *args: Any, shards: ShardBuffers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part: torch.Tensor | None = None  # reduced, not added to the sum on the host yet
        self.num_fetches = 0
        self._shards = shards
        self._host: HostGradient | None = None  # has the sum, and the device does not
        self._host_version: int | None = None  # the version counter of what was copied; None: it is on the device
        self._norm_squared: torch.Tensor | None = None

    def memory(self, *, is_overwritten: bool = False) -> torch.Tensor:
        """As of every gradient. Order: fetches a sum that is on the host, which may block the host."""
        if self._host is not None:
            host = self._host.values()
            self._forget()
            self.num_fetches += 1  # the caller may change the values from now on
            self.sum.store(self._shards.acquire(host.numel(), host.dtype).copy_(host))
        return super().memory(is_overwritten=is_overwritten)

    @property
    def is_on_host(self) -> bool:
        """True if the host has the sum, and the device does not."""
        return self._host is not None

    def _allocate(self, numel: int) -> torch.Tensor:
        return self._shards.acquire(numel, self.dtype)

    def _drop_memory(self) -> None:
        """Drop device memory: what reads it may not be known."""
        for memory in (self.sum.shard, self.part):
            if memory is not None and memory.numel():
                self._shards.discard(memory)
        self.part = None
        super()._drop_memory()

    def _forget(self) -> None:
        """The sum on the host is of no use any more."""
        self._host = self._norm_squared = self._host_version = None

    @property
    def version(self) -> tuple[int, int]:
        version = self.owned()._version if self._host_version is None else self._host_version
        return self.num_reductions + self.num_fetches, version

    @property
    def offloaded_norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of a sum that is on the host; None: it is on the device. Order: may block the host."""
        if self._host is not None and self._norm_squared is None:
            # The argument of a kernel: a copy to the device would block the host until the device has run everything.
            found = self._host.sum_of_squares().view(1)
            value = read_vector(found, when_fake=0.0)[0]
            self._norm_squared = torch.full((1,), value, dtype=found.dtype, device=self.buffer.device)[0]
        return self._norm_squared

    def _allocate_part(self, *, at_step: bool) -> torch.Tensor | None:
        is_late = self.state is GradientState.REDUCED
        if self._host is None or not (is_late or not at_step or len(self.axes) == 1):
            return super()._allocate_part(at_step=at_step)
        # Of a 16-bit sum in fp32, so that it is rounded once.
        self.part = self._shards.acquire(self.sum.owned_numel, torch.promote_types(self.dtype, torch.float32))
        return self.part

    def _add_part(self, part: torch.Tensor) -> None:
        if part is not self.part:
            super()._add_part(part)

    def offload(self, host: HostGradient, copied: CopyDone, *, is_for_step: bool) -> None:
        """Free the device memory of the sum, or of the part. The next access fetches the sum from the host.

        Args:
            host: has the sum from now on.
            copied: the copy to the host; the memory is reused after it.
            is_for_step: the step will ask for the norm, so the device computes it where it has the sum.
        """
        source = self.memory() if self.part is None else self.part
        self._norm_squared = sums_of_squares([source])[0] if is_for_step and self.part is None else None
        self._host_version, self._host, self.part = source._version, host, None
        self._shards.release(source, copied)
        self.sum.drop()

    def reset(self) -> None:
        """Drop the gradient of this step and its memory."""
        self._forget()
        super().reset()
        self._drop_memory()
        self.sum.reader = None
