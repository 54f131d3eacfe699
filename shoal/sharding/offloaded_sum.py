"""The sum of a gradient that is on the host between its reductions; the device has memory of it only for a moment.

The next micro-batch is reduced into a *part* on the device, which the host adds. Every other access fetches the sum.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.memory.stream_copies import CopyDone
from shoal.sharding.gradient_norm import sums_of_squares
from shoal.sharding.staging import ShardBuffers


class HostGradient(Protocol):
    """The sum on the host."""

    def values(self) -> torch.Tensor:
        """Order: blocks the host until all copies and additions are done. Shape: [owned numel]."""
        ...

    def sum_of_squares(self) -> torch.Tensor:
        """Of the values, on the host. Order: as ``values``. Shape: []."""
        ...


class OffloadedSum:
    """Memory of one offloaded sum.

    Memory: on the device a buffer that groups share, from a reduction until it has been copied to the host.
    """

    def __init__(self, shards: ShardBuffers, device: torch.device) -> None:
        self.part: torch.Tensor | None = None  # reduced, not added to the sum on the host yet
        self.num_fetches = 0
        self.version: int | None = None  # the version counter of what was copied; None: the sum is on the device
        self._shards = shards
        self._device = device
        self._host: HostGradient | None = None  # has the sum, and the device does not
        self._norm_squared: torch.Tensor | None = None

    @property
    def is_on_host(self) -> bool:
        """True if the sum is on the host alone."""
        return self._host is not None

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory of arbitrary values."""
        return self._shards.acquire(numel, dtype)

    def acquire_part(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory to reduce into what the host will add. Of a 16-bit sum in fp32, so that it is rounded once."""
        self.part = self._shards.acquire(numel, torch.promote_types(dtype, torch.float32))
        return self.part

    def fetch(self) -> torch.Tensor | None:
        """Fetch the sum to the device, where it stays; None: it is there. Order: may block the host."""
        if self._host is None:
            return None
        host = self._host.values()
        self.forget()
        self.num_fetches += 1  # the caller may change the values from now on
        return self._shards.acquire(host.numel(), host.dtype).copy_(host)

    def store(self, total: torch.Tensor, host: HostGradient, copied: CopyDone, *, is_for_step: bool) -> None:
        """Free the device memory of the sum, or of the part. The next access fetches the sum from the host.

        Args:
            total: the sum on the device, not used where there is a part.
            host: has the sum from now on.
            copied: the copy to the host; the memory is reused after it.
            is_for_step: the step will ask for the norm, so the device computes it where it has the sum.
        """
        source = total if self.part is None else self.part
        self._norm_squared = sums_of_squares([source])[0] if is_for_step and self.part is None else None
        self.version, self._host, self.part = source._version, host, None
        self._shards.release(source, copied)

    @property
    def norm_squared(self) -> torch.Tensor | None:
        """The sum of squares of a sum that is on the host; None: it is on the device. Order: may block the host."""
        if self._host is not None and self._norm_squared is None:
            self._norm_squared = self._host.sum_of_squares().to(self._device)
        return self._norm_squared

    def forget(self) -> None:
        """The sum on the host is of no use any more."""
        self._host = self._norm_squared = self.version = None

    def discard(self, total: torch.Tensor | None) -> None:
        """Drop device memory: what reads it may not be known."""
        for memory in (total, self.part):
            if memory is not None:
                self._shards.discard(memory)
        self.part = None
