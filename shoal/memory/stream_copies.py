"""Copies between an accelerator and host memory, in a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from shoal.memory.aligned import aligned_empty


class CopyDone:
    """The end of a copy."""

    def __init__(self, event: torch.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Make the current stream wait for this copy. Does not block the host."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def block(self) -> None:
        """Order: blocks the host until the copy has ended."""
        if self._event is not None:
            self._event.synchronize()


class StreamCopies:
    """Copies of one accelerator.

    Order: a copy starts after what was queued on the current stream when it was asked for, and after the copies before.
    The host is never blocked. Memory of sources and targets belongs to the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, CopyDone]:
        nbytes = source.numel() * source.element_size()
        host = aligned_empty(nbytes, is_pinned=True).view(source.dtype).view(source.shape)
        return host, self.copy(source, host)

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> CopyDone:
        return self.copy(host, target)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_source_freed: bool = False) -> CopyDone:
        """Start a copy; one side is host memory (page-locked, or the host is blocked).

        Args:
            is_source_freed: the caller drops ``source``, on the device, before the copy has ended.
        """
        if is_source_freed:
            source.record_stream(self._stream)
        with self.queued() as done:
            target.copy_(source, non_blocking=True)
        return done

    @contextmanager
    def queued(self) -> Iterator[CopyDone]:
        """Queue what the block does on the copy stream, which first waits for what is queued on the current stream.

        Order: the current stream does not wait for the block, unless ``wait()`` of the end of the block is called
        after it.
        """
        event = torch.Event(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield CopyDone(event, self._device)
            event.record(self._stream)


class ComputeStream:
    """The stream in which a model computes. A script may choose another (``with torch.cuda.stream(s)``) at any time.

    Args:
        device: for the CPU, which has no streams, every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def follow(self, in_use: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Where the current stream is another than at the last call, make it wait for that one.

        Args:
            in_use: gives the tensors whose memory may be freed while the new stream uses it.
        """
        if self._stream is None:
            return
        current = torch.accelerator.current_stream(self._device)
        if current == self._stream:
            return
        current.wait_stream(self._stream)
        self._stream = current
        for tensor in in_use():
            tensor.record_stream(current)


def mark(device: torch.device) -> CopyDone:
    """An event after all work queued on the current stream of ``device`` so far."""
    if device.type == "cpu":
        return CopyDone()
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return CopyDone(event, device)


def copies_of(device: torch.device) -> StreamCopies | None:
    """The copies of a device; None for the CPU, whose memory is the host's."""
    return None if device.type == "cpu" else StreamCopies(device)
