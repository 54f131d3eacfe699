"""The disk of a dry run: extents without files, whose reads and writes take simulated time and move nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.memory.disk import DiskTier
from shoal.memory.io_threads import Ticket
from shoal.memory.transfer import FileExtent, Traffic
from shoal.streams import host_memory


class UnwrittenDisk(DiskTier):
    """A disk with room for everything, for tensors without values."""

    def __init__(self) -> None:
        self._extents: dict[str, FileExtent] = {}
        self.traffic = Traffic()

    def memory(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        return host_memory(torch.empty(nbytes, dtype=torch.uint8), is_pinned=is_pinned)

    def reserve(self, nbytes: int, *, num_ranks: int = 1) -> None:
        pass

    def allocate(self, name: str, nbytes: int) -> FileExtent:
        extent = self._extents[name] = FileExtent(name, nbytes, "", "", (0, 0))
        return extent

    def free(self, extent: FileExtent) -> None:
        self._own(extent)
        extent.is_free = True
        del self._extents[extent.name]

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._extents.clear()

    def _prepare(
        self, extent: FileExtent, tensor: torch.Tensor, offset: int, *, is_write: bool
    ) -> Callable[[], Ticket]:
        self.traffic.add(tensor.nbytes, is_write=is_write)
        return _TicketOfNothing


class _TicketOfNothing(Ticket):
    """Of a simulated transfer, which is done when the host has waited for it."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.finish(None)
        super().wait()
