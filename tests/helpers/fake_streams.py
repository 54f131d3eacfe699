"""Streams and events of a GPU that is not there: they do nothing, and record who waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._streams.log.append(f"{self.name} waits for {event.where}")

    def __enter__(self) -> FakeStream:
        self._streams.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._streams.entered.pop() is self


class FakeEvent:
    """``where``: the stream and the number of the record there."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams, self.where = streams, "nothing"

    def record(self, stream: FakeStream) -> None:
        self._streams.num_events += 1
        self.where = f"{stream.name} at {self._streams.num_events}"
        self._streams.log.append(f"event {self._streams.num_events} on {stream.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._streams.log.append(f"host waits for {self.where}")


class FakeStreams:
    """In the place of torch's, until the test ends. The current stream is ``compute`` where no other was entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.num_events = 0
        self.entered: list[FakeStream] = []
        self.compute = FakeStream(self, "compute")
        self._num_streams = 0
        monkeypatch.setattr(torch, "Stream", self._stream)
        monkeypatch.setattr(torch, "Event", lambda *_: FakeEvent(self))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: self.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)

    @property
    def current(self) -> FakeStream:
        return self.entered[-1] if self.entered else self.compute

    def _stream(self, *_: Any) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, f"copy {self._num_streams}")
