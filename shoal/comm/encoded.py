"""A communicator of activations: the floating-point values that it sums and gathers are sent in a format.

    tp = Encoded(world.communicator("tp", mesh), Int8())
    autograd.all_reduce(linear(x), tp, label="mlp out")    # and what backward sends for it

What it does for another rank alone (all_to_all, send) is sent as it is: see ``wire.RowBytes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.comm.formats import WireFormat
from shoal.comm.protocol import Call, Communicator, Step, Work
from shoal.comm.wire import Wire


class Encoded(Communicator):
    """The ranks of another communicator.

    Args:
        format: of floating-point tensors, whatever their dtype.
    """

    def __init__(self, comm: Communicator, format: WireFormat) -> None:
        super().__init__(comm.backend, comm.recorder)
        self._comm = comm
        self._wire = Wire(format)

    def issue(self, call: Call) -> Work:
        return self._comm.issue(call)

    def staged(self, tensor: torch.Tensor, first: Callable[[], Work], *steps: Step) -> Work:
        return self._comm.staged(tensor, first, *steps)

    def wire_of(self, full: torch.Tensor, wire: Wire | None) -> Wire | None:
        return super().wire_of(full, wire or (self._wire if full.is_floating_point() else None))


def gather_milliseconds(
    comm: Communicator, full: torch.Tensor, format: WireFormat | None, synchronize: Callable[[], None]
) -> float:
    """The shortest of three gathers of ``full`` in a format; None: as it is. Order: blocks the host.

    Args:
        synchronize: blocks until the device is done.
    """
    found = []
    for _ in range(3):
        synchronize()
        began = time.perf_counter()
        encoded(comm, format).all_gather(full, label="time of a format").drain()
        synchronize()
        found.append((time.perf_counter() - began) * 1e3)
    return min(found)


def encoded(comm: Communicator, format: WireFormat | None) -> Communicator:
    """``comm``, whose activations are sent in ``format``; None: as they are."""
    return comm if format is None else Encoded(comm, format)
