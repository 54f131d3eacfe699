"""The gather of the unit that comes next, while its update on the host is pending, during the forward before it.

before the forward   its buffers are allocated, and a mark is set in the compute stream
after it is queued   the host waits for the update; copy and all-gather wait for the mark, not for the forward

On a CPU the second part alone.
"""

from __future__ import annotations

import torch

from shoal.comm.side_stream import CopyDone
from shoal.memory.stream_copies import StreamCopies, mark
from shoal.sharding.unit import Unit
from shoal.streams import is_accelerator


class GatherAhead:
    """Of one model, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: StreamCopies | None = None  # made when it is first needed
        self._reserved: Unit | None = None
        self._mark = CopyDone()

    def reserve(self, unit: Unit | None) -> None:
        """``unit`` will be gathered next, when a forward has been queued; None: no unit."""
        if unit is self._reserved:
            return
        self.cancel()
        if unit is not None and is_accelerator(self._device):
            for group in unit.sharded:
                group.buffer.allocate()
            self._reserved, self._mark = unit, mark(self._device)

    def start(self, unit: Unit) -> None:
        """Gather ``unit``, after its update. Order: blocks the host until the update is done."""
        if unit is not self._reserved:
            unit.start_gather()
            return
        self._reserved = None
        self.start_after(self._mark, unit)

    def start_after(self, mark: CopyDone, unit: Unit) -> None:
        """As ``start``, for a unit whose buffers are allocated: copy and all-gather wait for ``mark`` alone."""
        if not is_accelerator(self._device):
            unit.start_gather()
            return
        if self._copies is None:
            self._copies = StreamCopies(self._device)
        with self._copies.after(mark) as done:
            unit.start_gather()
        unit.wait_also(done)

    def cancel(self) -> None:
        """No forward will follow."""
        if self._reserved is not None:
            for group in self._reserved.sharded if self._reserved.is_released else ():
                group.buffer.free()
            self._reserved = None
