"""A communicator that times its collectives: it waits for each immediately and records it in the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.comm.recorder import RecordedCommunicator, Result
from shoal.device import Device
from shoal.observe.collectives import CollectiveLog


class TimedCommunicator(RecordedCommunicator):
    """A communicator of the same backend as another, that times its collectives.

    Sends and receives are not timed: to wait for one receive at a time could block ranks that send to each other in a
    ring.

    Order: for a recorded collective the host waits for the device before it and for its end, so it overlaps with
    nothing; ranks issue the same calls in the same order.
    """

    def __init__(self, inner: Communicator, log: CollectiveLog, device: Device) -> None:
        assert isinstance(inner, RecordedCommunicator)  # as every communicator of a world
        super().__init__(inner.backend, inner.recorder)
        self._log = log
        self._device = device

    def issue(
        self,
        op: str,
        label: str,
        nbytes: int,
        tensor: torch.Tensor | None,
        call: Callable[[], Result],
        kind: Literal["data", "control"] = "data",
    ) -> Result:
        def recorded() -> Result:
            return RecordedCommunicator.issue(self, op, label, nbytes, tensor, call, kind)

        if op in ("send", "recv") or not self._log.wants(op, label):
            return recorded()
        result, milliseconds = timed(
            self._device, recorded, lambda work: work.wait() if isinstance(work, Work) else None
        )
        sent = 0 if tensor is None else tensor.nbytes
        shards = self.size if op in ("all_gather", "reduce_scatter") else 1
        self._log.add(op, sent // shards, milliseconds, size=self.size, caller=label)
        return result


def timed(device: Device, call: Callable[[], Result], finish: Callable[[Result], object]) -> tuple[Result, float]:
    """The result of ``call``, and the milliseconds until ``finish(result)`` and the device are done."""
    device.synchronize()
    began = time.perf_counter()
    result = call()
    finish(result)
    device.synchronize()
    return result, (time.perf_counter() - began) * 1e3
