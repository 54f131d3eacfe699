"""Where one rank's shard of a flat buffer is stored: on the device, on the host, or on a disk.

| storage         | ``values``                                  | a fetch                        |
| --------------- | ------------------------------------------- | ------------------------------ |
| `DeviceStorage` | memory that the device computes in          | nothing                        |
| `HostStorage`   | host memory, copied to the device for a use | nothing                        |
| on a disk       | a placeholder, except while it is pinned    | a read of the disk into memory |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeAlias

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.memory.stream_copies import StreamCopies
from shoal.sharding.placement import Tier

ByteRanges = Sequence[tuple[int, int]]
AllGather: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], Work]  # into the whole buffer, of a shard


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The data of what is not in memory: its true shape and dtype, one element of memory, NaN."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def is_placeholder(data: torch.Tensor) -> bool:
    """True if ``data`` is one element of memory, expanded to a larger shape."""
    return data.numel() > 1 and not any(data.stride())


class ShardStorage:
    """What a shard's storage can do. In memory, fetching and pinning do nothing."""

    tier: ClassVar[Tier]
    copies: StreamCopies | None = None  # what copies it to the device; None: the current stream does

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def start_fetch(self, ranges: ByteRanges | None = None) -> None:
        """Begin to read ranges of bytes of the shard (None: all of it). Does not block the host."""

    def fetch(self, ranges: ByteRanges | None = None) -> None:
        """Wait until they are read. Raises: TierError: they could not be."""

    def can_fetch_ahead(self) -> bool:
        """True if there is memory to read the shard ahead of its use."""
        return True

    def pin(self, *, is_overwritten: bool = False, ranges: ByteRanges | None = None) -> None:
        """Keep the shard in memory until ``unpin()``.

        Args:
            is_overwritten: the caller overwrites all of it, so it is not read, and zero.
            ranges: bytes of it that the caller reads; None: all.

        Raises: TierError: it could not be read.
        """

    def unpin(self, *, is_read_only: bool = False) -> None:
        """Store the shard, unless it was only read. Raises: TierError."""

    def allocate(self, full: torch.Tensor, comm: Communicator) -> None:
        """Allocate what the next gather into ``full`` needs in addition to it, on the current stream."""

    def free(self) -> None:
        """Free it: there will be no gather."""

    def gather(self, full: torch.Tensor, comm: Communicator, all_gather: AllGather) -> Work:
        """Gather the shards of the ranks of ``comm`` into ``full``."""
        return all_gather(full, self.values)

    @contextmanager
    def resident(
        self, *, is_overwritten: bool = False, is_read_only: bool = False, ranges: ByteRanges | None = None
    ) -> Iterator[None]:
        """Keep the shard in memory inside the block; changes are stored, unless ``is_read_only``."""
        self.pin(is_overwritten=is_overwritten, ranges=ranges)
        try:
            yield
        finally:
            self.unpin(is_read_only=is_read_only)


class DeviceStorage(ShardStorage):
    """A shard in memory that the device computes in."""

    tier = Tier.DEVICE
