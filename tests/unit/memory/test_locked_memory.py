"""Page-locked host memory has the size that was asked for, and is unlocked when its last tensor is gone."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from shoal.comm.side_stream import CopyDone
from shoal.device import _LockedMemory, host_empty
from shoal.memory.host import aligned_empty
from shoal.memory.stream_copies import StreamCopies
from shoal.streams import HostThread
from tests.helpers.fake_streams import GPU, FakeStreams

NUMEL = 300_001  # 1.2 MB of fp32: torch's allocator would lock 2 MiB


class Driver:
    """``torch.cuda.cudart()``, as far as memory is locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.log: list[str] = []
        self.is_capturing = False
        self._error = error
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self._error:
            self.locked[address] = nbytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        self.log.append("unlock")
        return 0


def test_exactly_what_was_asked_for_is_locked_until_the_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    memory = host_empty(NUMEL, torch.float32, GPU)
    assert memory.shape == (NUMEL,)
    assert driver.locked == {memory.data_ptr(): 4 * NUMEL}
    view = memory[5:]
    del memory
    assert driver.log == []
    view.fill_(3.0)
    assert view.sum() == 3.0 * (NUMEL - 5)
    del view
    assert driver.log == ["synchronize", "unlock"]
    assert driver.locked == {}


def test_memory_that_is_freed_while_a_graph_is_captured_is_unlocked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    kept = host_empty(NUMEL, torch.float32, GPU)
    memory = host_empty(NUMEL, torch.float32, GPU).fill_(3.0)
    address = memory.data_ptr()
    driver.is_capturing = True
    del memory
    assert driver.log == []
    assert driver.locked == {kept.data_ptr(): 4 * NUMEL, address: 4 * NUMEL}
    driver.is_capturing = False
    other = host_empty(NUMEL, torch.float32, GPU)
    assert driver.log == ["synchronize", "unlock"]
    assert set(driver.locked) == {kept.data_ptr(), other.data_ptr()}
    del kept
    assert set(driver.locked) == {other.data_ptr()}


def test_buffers_of_the_disk_tier_have_the_size_that_was_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    memory = aligned_empty(5_000_001, is_pinned=True)
    assert memory.data_ptr() % 4096 == 0
    assert driver.locked == {memory.data_ptr(): 5_000_001}


@pytest.mark.parametrize("fails", ["lock", "map"])
def test_where_no_more_can_be_locked_buffers_are_ordinary_memory(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Driver(monkeypatch, error=2 if fails == "lock" else 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if fails == "map":
        monkeypatch.setattr(_LockedMemory, "madvise", refuse)
    with caplog.at_level(logging.WARNING, "shoal"):
        assert aligned_empty(5_000_001, is_pinned=True).numel() == 5_000_001
    assert "could not be page-locked" in caplog.text


def refuse(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_memory_for_activations_is_locked_once_and_not_unlocked_while_it_is_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To unlock memory waits for the device; a backward pass must not."""
    driver, _ = Driver(monkeypatch), FakeStreams(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    copies = StreamCopies(GPU)
    for step in range(3):
        sources = [torch.full((NUMEL + layer % 2,), float(layer + step)) for layer in range(6)]
        saved = [copies.to_host(source)[0] for source in sources]
        assert all(torch.equal(*pair) for pair in zip(saved, sources, strict=True))
        while saved:
            saved.pop()
        assert (len(driver.locked), driver.log) == (6, [])
    assert sum(driver.locked.values()) <= 6 * (4 * NUMEL + 4) * 9 / 8
    for numel in (NUMEL, 2 * NUMEL, 3 * NUMEL, 4 * NUMEL):  # as where batches have different lengths
        saved = [copies.to_host(torch.zeros(numel))[0] for _ in range(6)]
        saved.clear()
        assert len(driver.locked) == 6
    del copies
    assert driver.locked == {}


def test_a_thread_of_the_host_is_on_the_device_of_the_one_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    of_threads = {threading.get_ident(): 3}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: of_threads.get(threading.get_ident(), 0))
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: of_threads.update({threading.get_ident(): index})
    )
    thread = HostThread("test")
    assert thread.submit(torch.accelerator.current_device_index).result() == 3
    thread.close()


def test_the_host_sleeps_until_a_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's ``synchronize`` would keep a core busy for all that time."""
    log: list[str] = []
    answers = iter([False, False, True])
    event = SimpleNamespace(query=lambda: next(answers), synchronize=lambda: log.append("ended"))
    monkeypatch.setattr("shoal.comm.side_stream.time.sleep", lambda seconds: log.append(f"sleeps {0 < seconds < 2e-3}"))
    CopyDone(event).block()
    assert log == ["sleeps True", "sleeps True", "ended"]


def test_where_pages_cannot_be_locked_the_memory_is_ordinary_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from shoal.device import _warn_unpinned

    _warn_unpinned.cache_clear()
    driver = Driver(monkeypatch, error=2)
    with caplog.at_level(logging.WARNING, "shoal"):
        memory = host_empty(NUMEL, torch.float32, GPU)
    assert memory.fill_(1.0).sum() == NUMEL
    assert "could not be page-locked" in caplog.text
    assert "error 2" in caplog.text
    del memory
    assert driver.log == []
