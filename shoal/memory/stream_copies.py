"""Copies between an accelerator and host memory, in a stream of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from shoal.comm.side_stream import CopyDone, SideStream
from shoal.memory.host import PAGE, aligned_empty, round_up
from shoal.streams import is_accelerator, streams_of


class StreamCopies(SideStream):
    """Copies of one accelerator.

    Order: a copy starts after what was queued on the current stream when it was asked for, and after the copies before.
    The host is never blocked. Memory of sources and targets belongs to the caller's stream.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._free: dict[int, list[torch.Tensor]] = {}  # by bytes, memory of ``to_host`` that is in no use

    def to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, CopyDone]:
        """Start a copy to page-locked memory of the same shape and dtype.

        Memory: up to an eighth more than ``source``. Once the tensor that is returned is gone, views of it or not, a
        later call takes the memory again: to lock it takes longer than a copy, and to unlock it waits for the device.
        """
        nbytes = source.numel() * source.element_size()
        size = round_up(nbytes, max(2 ** (nbytes.bit_length() - 4), PAGE) if nbytes else 1)
        if blocks := self._free.get(size):
            block = blocks.pop()
        else:
            others = next(filter(None, self._free.values()), None)
            if others is not None:  # where sizes change, old ones do not pile up
                del others[0]
            block = aligned_empty(size, is_pinned=True)
        host = block[:nbytes].view(source.dtype).view(source.shape)
        weakref.finalize(host, self._free.setdefault(size, []).append, block).atexit = False
        return host, self.copy(source, host)

    def to_device(self, host: torch.Tensor, target: torch.Tensor) -> CopyDone:
        return self.copy(host, target)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_source_freed: bool = False) -> CopyDone:
        """Start a copy; one side is host memory (page-locked, or the host is blocked).

        Args:
            is_source_freed: the caller drops ``source``, on the device, before the copy has ended.
        """
        if is_source_freed:
            self._streams.record_stream(source, self._stream)
        with self.queued() as done:
            target.copy_(source, non_blocking=True)
        return done

    @contextmanager
    def after(self, mark: CopyDone) -> Iterator[CopyDone]:
        """Queue what the block does on the copy stream, which waits for ``mark`` and not for what was queued since.

        Memory that the block allocates is the copy stream's.
        """
        event = self._streams.event()
        with self._stream:
            mark.wait()
            yield CopyDone(event, self._streams)
            event.record(self._stream)


class ComputeStream:
    """The stream in which a model computes. A script may choose another (``with torch.cuda.stream(s)``) at any time.

    Args:
        device: for the CPU, which has no streams, every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.current()
        self.has_streams = self._streams is not None

    def follow(self, in_use: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Where the current stream is another than at the last call, make it wait for that one.

        Args:
            in_use: gives the tensors whose memory may be freed while the new stream uses it.
        """
        if self._streams is None or self._stream is None:
            return
        current = self._streams.current()
        if current == self._stream:
            return
        current.wait_stream(self._stream)
        self._stream = current
        for tensor in in_use():
            self._streams.record_stream(tensor, current)


def mark(device: torch.device) -> CopyDone:
    """An event after all work queued on the current stream of ``device`` so far."""
    streams = streams_of(device)
    if streams is None:
        return CopyDone()
    event = streams.event()
    event.record(streams.current())
    return CopyDone(event, streams)


def copies_of(device: torch.device) -> StreamCopies | None:
    """The copies of a device; None for the CPU, whose memory is the host's."""
    return StreamCopies(device) if is_accelerator(device) else None
