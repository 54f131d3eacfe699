"""A stream of an accelerator next to the one in which a model computes, and the end of what is queued there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.streams import Streams, streams_of

_SHORTEST_SLEEP, _LONGEST_SLEEP = 2e-5, 1e-3  # seconds


class CopyDone:
    """The end of a copy."""

    def __init__(self, event: Any = None, streams: Streams | None = None) -> None:
        self._event = event
        self._streams = streams

    def wait(self) -> None:
        """Make the current stream wait for this copy. Does not block the host."""
        if self._streams is not None:
            self._streams.current().wait_event(self._event)

    def block(self) -> None:
        """Order: blocks the host until the copy has ended, and up to an eighth of that time more.

        Threads of updates on the host wait here, and the driver waits for an event of torch by keeping a core busy
        (``torch.Event`` ignores ``blocking``). So this thread sleeps until the event has happened.
        """
        if self._event is None:
            return
        start = time.monotonic()
        while not self._event.query():
            time.sleep(min(max((time.monotonic() - start) / 8, _SHORTEST_SLEEP), _LONGEST_SLEEP))
        self._event.synchronize()


class SideStream:
    """A stream next to the one that is current."""

    def __init__(self, device: torch.device) -> None:
        streams = streams_of(device)
        assert streams is not None  # a CPU has none
        self._streams = streams
        self._stream = streams.stream()

    @contextmanager
    def queued(self) -> Iterator[CopyDone]:
        """Queue what the block does on this stream, which first waits for what is queued on the current stream.

        Order: the current stream does not wait for the block, unless ``wait()`` of the end of the block is called
        after it.
        """
        current = self._streams.current()
        event = self._streams.event()
        if current == self._stream:  # inside ``after``; a stream of torch 2.11 is not entered twice
            yield CopyDone(event, self._streams)
            event.record(self._stream)
            return
        self._stream.wait_stream(current)
        with self._stream:
            yield CopyDone(event, self._streams)
            event.record(self._stream)
