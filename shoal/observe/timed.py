"""A communicator that times its collectives: it waits for each immediately and records it in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shoal.comm.protocol import Communicator, Work
from shoal.comm.wire import WireFormat
from shoal.device import Device
from shoal.observe.collectives import CollectiveLog

_Result = TypeVar("_Result")


class TimedCommunicator:
    """A communicator around another that times its collectives.

    Order: for a recorded collective the host waits for the device before it and for its end, so it overlaps with
    nothing; ranks issue the same calls in the same order.
    """

    def __init__(self, inner: Communicator, log: CollectiveLog, device: Device) -> None:
        self.axis, self.rank, self.size = inner.axis, inner.rank, inner.size
        self._inner = inner
        self._log = log
        self._device = device

    @property
    def scratch_nbytes(self) -> int:
        return self._inner.scratch_nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work:
        def issue() -> Work:
            return self._inner.all_gather(full, shard, label=label, wire=wire)

        return self._work("all_gather", label, full.nbytes // self.size, issue)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: WireFormat | None = None,
    ) -> Work:
        def issue() -> Work:
            return self._inner.reduce_scatter(full, out, scale=scale, accumulate=accumulate, label=label, wire=wire)

        return self._work("reduce_scatter", label, full.nbytes // self.size, issue)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        return self._work(
            "all_reduce", label, full.nbytes, lambda: self._inner.all_reduce(full, scale=scale, label=label)
        )

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        def issue() -> Work:
            return self._inner.all_to_all(out, source, out_splits=out_splits, source_splits=source_splits, label=label)

        return self._work("all_to_all", label, source.nbytes, issue)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        """Not timed: to wait for one receive at a time could block ranks that send to each other in a ring."""
        return self._inner.send(tensor, peer, label=label)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        return self._inner.recv(tensor, peer, label=label)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        return self._work("broadcast", label, tensor.nbytes, lambda: self._inner.broadcast(tensor, source, label=label))

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        return self._work("exchange", label, vector.nbytes, lambda: self._inner.exchange(vector, label=label))

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return self._timed("gather_objects", label, 0, lambda: self._inner.gather_objects(value, label=label))

    def barrier(self, *, label: str) -> None:
        self._timed("barrier", label, 0, lambda: self._inner.barrier(label=label))

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()

    def _work(self, kind: str, label: str, nbytes: int, issue: Callable[[], Work]) -> Work:
        return self._timed(kind, label, nbytes, issue, lambda work: work.wait())

    def _timed(
        self,
        kind: str,
        label: str,
        nbytes: int,
        call: Callable[[], _Result],
        finish: Callable[[_Result], object] = lambda result: None,
    ) -> _Result:
        if not self._log.wants(kind, label):
            return call()
        result, milliseconds = timed(self._device, call, finish)
        self._log.add(kind, nbytes, milliseconds, size=self.size, caller=label)
        return result


def timed(device: Device, call: Callable[[], _Result], finish: Callable[[_Result], object]) -> tuple[_Result, float]:
    """The result of ``call``, and the milliseconds until ``finish(result)`` and the device are done."""
    device.synchronize()
    began = time.perf_counter()
    result = call()
    finish(result)
    device.synchronize()
    return result, (time.perf_counter() - began) * 1e3
