"""The shard of a second, narrower sharding: kept by the forward pass for the gathers of backward (ZeRO++ hpZ)."""

from __future__ import annotations

from typing import Any

from shoal.comm.protocol import Work
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.placement import Placement
from shoal.sharding.storage import DeviceStorage
from shoal.streams import name_memory


class SecondShard(FlatBuffer):
    """A buffer on the axis of the second sharding, which shares the whole buffer of the parameters.

    Args:
        of: the buffer of the parameters.

    Memory: this rank's range, from the first forward until ``free_shard()``.
    """

    def __init__(self, of: FlatBuffer, *args: Any) -> None:
        super().__init__(*args, pool=of.pool)
        self._of = of

    @property
    def is_kept(self) -> bool:
        """True if a forward pass has kept this rank's range."""
        return bool(self.shard.numel())

    def keep(self) -> None:
        """Keep this rank's range for the backward pass, while the whole buffer is full."""
        if not self.is_kept:
            numel = self.layout.numel // self.comm.size
            kept = self.comm.empty(numel, self.dtype, self.device)
            self.storage = DeviceStorage(name_memory(kept, f"the second shard of unit {self.label!r}", "gathered"))
        self.wait_for_peers()
        self.full = self._of.full
        self.assume(Placement())
        self.redistribute(self.stored)

    def gather(self) -> Work:
        """Gather the parameters from it."""
        self._of.assume(Placement())
        self.full = self._of.full
        return self.redistribute(Placement())

    def free_shard(self) -> None:
        """Free the range, until the next forward pass keeps it again."""
        self.storage = DeviceStorage(self.shard.new_empty(0))
