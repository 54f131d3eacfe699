"""Times of recomputed segments: forward, recomputation, backward, by the segment's name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shoal.device import Device
from shoal.text import table


@dataclass
class Times:
    """Sums over the calls of one segment, in seconds. A segment inside another counts in both."""

    calls: int = 0
    forward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    backward_seconds: float = 0.0


class _TimedCall:
    def __init__(self) -> None:
        self.since: float | None = None  # the end of the recomputation, or the last gradient


class SegmentTimes:
    """Measures the segments that run inside its contexts.

    Order: the host waits for the device at both ends of each measurement, so nothing overlaps.
    """

    def __init__(self) -> None:
        self._times: dict[str, Times] = {}
        self._lock = threading.Lock()

    def watched(self, name: str, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _TimedCall]:
        """The same inputs, with hooks on their gradients that time the backward of the call that gets them.

        The backward of a segment without gradients of inputs counts as 0.
        """
        call = _TimedCall()

        def arrived(gradient: torch.Tensor) -> None:
            if call.since is not None:
                now = self._now(gradient.device)
                with self._lock:
                    self._times[name].backward_seconds += now - call.since
                call.since = now

        watched = []
        for tensor in tensors:
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # a new autograd node: only this segment's share of the gradient
                tensor.register_hook(arrived)
            watched.append(tensor)
        return watched, call

    @contextmanager
    def forward(self, name: str, device: torch.device) -> Iterator[None]:
        start = self._now(device)
        try:
            yield
        finally:
            seconds = self._now(device) - start
            with self._lock:
                times = self._times.setdefault(name, Times())
                times.calls += 1
                times.forward_seconds += seconds

    @contextmanager
    def recompute(self, name: str, device: torch.device, call: _TimedCall) -> Iterator[None]:
        start = self._now(device)
        try:
            yield
        finally:
            call.since = self._now(device)
            with self._lock:
                self._times[name].recompute_seconds += call.since - start

    def _now(self, device: torch.device) -> float:
        Device(device).synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, Times]:
        """The sums by name; resets them."""
        with self._lock:
            taken, self._times = self._times, {name: Times() for name in self._times}
        return {name: times for name, times in taken.items() if times.calls or times.recompute_seconds}


def as_table(times: dict[str, Times]) -> str:
    """Milliseconds a segment took, as text.

    >>> print(as_table({"blocks.0": Times(2, 0.004, 0.003, 0.006)}))
    segment   calls  forward ms  recompute ms  backward ms
    --------  -----  ----------  ------------  -----------
    blocks.0      2         4.0           3.0          6.0
    """
    rows = [
        (
            name,
            each.calls,
            *(f"{1e3 * s:.1f}" for s in (each.forward_seconds, each.recompute_seconds, each.backward_seconds)),
        )
        for name, each in times.items()
    ]
    return table(rows, ["segment", "calls", "forward ms", "recompute ms", "backward ms"])
