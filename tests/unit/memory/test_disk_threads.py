"""Operations keep the order that their bytes ask for, the queue is bounded, and closing ends everything."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from shoal.errors import TierError, UsageError
from shoal.memory.io_threads import IoThreads, Part


class Step:
    """An operation of ``num_chunks`` chunks that records what it does, and may wait for a gate."""

    def __init__(
        self,
        log: list[str],
        name: str,
        start: int,
        stop: int,
        *,
        is_write: bool,
        key: object = "file",
        num_chunks: int = 1,
        gate: threading.Event | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.key = key
        self.start, self.stop, self.is_write = start, stop, is_write
        self.log, self.name, self.num_chunks, self.gate, self.error = log, name, num_chunks, gate, error
        self.ended_with: list[BaseException | None] = []

    def begin(self) -> Sequence[Part]:
        self.log.append(f"{self.name} begins")
        return [self._part] * self.num_chunks

    def _part(self, bounce: torch.Tensor) -> None:
        assert bounce.shape == (4096,)
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.error is not None:
            self.log.append(f"{self.name} fails")
            raise self.error
        self.log.append(f"{self.name} moves")

    def end(self, error: BaseException | None) -> None:
        self.ended_with.append(error)
        self.log.append(f"{self.name} ends")


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    made = IoThreads(3, name="test", bounce_nbytes=4096, max_pending=8)
    yield made
    made.close()


def test_a_read_waits_for_an_earlier_write_of_the_same_bytes_only(threads: IoThreads) -> None:
    log: list[str] = []
    gate = threading.Event()
    write = threads.submit(Step(log, "write", 0, 10, is_write=True, gate=gate))
    same = threads.submit(Step(log, "same", 9, 12, is_write=False))
    threads.submit(Step(log, "beside", 10, 20, is_write=False)).wait(20)
    threads.submit(Step(log, "other", 0, 10, is_write=False, key="another file")).wait(20)
    assert not same.is_done
    assert "same begins" not in log
    gate.set()
    same.wait(20)
    assert write.is_done
    assert log.index("write ends") < log.index("same begins")


def test_a_write_waits_for_earlier_reads_but_reads_do_not_wait_for_each_other(threads: IoThreads) -> None:
    log: list[str] = []
    gate = threading.Event()
    threads.submit(Step(log, "read", 0, 10, is_write=False, gate=gate))
    threads.submit(Step(log, "second read", 0, 10, is_write=False)).wait(20)
    write = threads.submit(Step(log, "write", 0, 10, is_write=True))
    last = threads.submit(Step(log, "last", 0, 10, is_write=False))
    assert not write.is_done
    gate.set()
    last.wait(20)
    order = [log.index(entry) for entry in ("read ends", "write begins", "write ends", "last begins")]
    assert order == sorted(order)


def test_writes_of_the_same_bytes_keep_their_order(threads: IoThreads) -> None:
    log: list[str] = []
    tickets = [threads.submit(Step(log, f"{i}", 0, 4, is_write=True, num_chunks=3)) for i in range(8)]
    for ticket in tickets:
        ticket.wait(20)
    assert [entry for entry in log if entry.endswith("ends")] == [f"{i} ends" for i in range(8)]
    assert log.count("5 moves") == 3


def test_a_failure_is_raised_by_its_own_ticket_every_time_and_skips_the_remaining_chunks(threads: IoThreads) -> None:
    log: list[str] = []
    step = Step(log, "bad", 0, 4, is_write=True, num_chunks=50, error=OSError(5, "Input/output error"))
    bad = threads.submit(step)
    good = threads.submit(Step(log, "good", 0, 4, is_write=True))
    good.wait(20)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            bad.wait(20)
    assert [type(error) for error in step.ended_with] == [OSError]
    assert 1 <= log.count("bad fails") <= 3  # those that the three threads had begun


def test_an_operation_without_chunks_is_done(threads: IoThreads) -> None:
    log: list[str] = []
    threads.submit(Step(log, "empty", 0, 0, is_write=True, num_chunks=0)).wait(20)
    assert log == ["empty begins", "empty ends"]


def test_the_queue_is_bounded() -> None:
    log: list[str] = []
    gate = threading.Event()
    threads = IoThreads(1, name="test", bounce_nbytes=4096, max_pending=2)
    for index in range(2):
        threads.submit(Step(log, f"{index}", index, index + 1, is_write=True, gate=gate))
    submitted = threading.Event()

    def third() -> None:
        threads.submit(Step(log, "third", 5, 6, is_write=True))
        submitted.set()

    caller = threading.Thread(target=third)
    caller.start()
    assert not submitted.wait(0.2)
    assert threads._num_pending == 2
    gate.set()
    assert submitted.wait(20)
    caller.join()
    threads.wait_idle()
    assert threads._num_pending == 0
    threads.close()


def test_drain_waits_for_one_file_or_for_all(threads: IoThreads) -> None:
    log: list[str] = []
    gate = threading.Event()
    held = threads.submit(Step(log, "held", 0, 1, is_write=True, key="a", gate=gate))
    threads.submit(Step(log, "free", 0, 1, is_write=True, key="b"))
    threads.wait_idle("b")
    assert not held.is_done
    gate.set()
    threads.wait_idle()
    assert held.is_done


def test_closing_finishes_running_operations_and_fails_the_others() -> None:
    log: list[str] = []
    gate, begun = threading.Event(), threading.Event()
    threads = IoThreads(1, name="test", bounce_nbytes=4096, max_pending=8)
    running = Step(log, "running", 0, 1, is_write=True, gate=gate)
    queued = Step(log, "queued", 0, 1, is_write=True)
    wait = gate.wait
    gate.wait = lambda timeout=None: begun.set() or wait(timeout)  # type: ignore[method-assign,func-returns-value]
    tickets = [threads.submit(running), threads.submit(queued)]
    assert begun.wait(20)
    closer = threading.Thread(target=threads.close)
    closer.start()
    gate.set()
    closer.join()
    tickets[0].wait(20)
    with pytest.raises(UsageError, match="tier-closed"):
        tickets[1].wait(20)
    assert [len(running.ended_with), len(queued.ended_with)] == [1, 1]
    with pytest.raises(UsageError, match="tier-closed"):
        threads.submit(Step(log, "late", 0, 1, is_write=True))
    threads.close()


def test_a_thread_that_a_device_blocks_does_not_block_closing_and_keeps_its_file_open() -> None:
    log: list[str] = []
    gate = threading.Event()
    threads = IoThreads(1, name="test", bounce_nbytes=4096, max_pending=8)
    stuck = Step(log, "stuck", 0, 1, is_write=True, gate=gate, num_chunks=2)
    ticket = threads.submit(stuck)
    with pytest.raises(TierError, match=r"did not finish within 0\.1 seconds"):
        ticket.wait(0.1)
    threads.close(timeout_seconds=0.1)
    with pytest.raises(UsageError, match="tier-closed"):
        ticket.wait(20)
    assert stuck.ended_with == []
    gate.set()


def test_a_thread_that_waits_keeps_no_operation_alive(threads: IoThreads) -> None:
    import gc
    import weakref

    step = Step([], "one", 0, 4, is_write=True)
    gone = weakref.ref(step)
    threads.submit(step).wait(20)
    threads.wait_idle()
    del step
    gc.collect()
    assert gone() is None
