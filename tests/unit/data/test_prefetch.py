"""Copies of batches run next to the step before, and the step waits for its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal.comm.side_stream import CopyDone
from shoal.data import InMemorySource, Loader, TokenStream, ahead_on, split
from shoal.simulation.check import StreamCheck


def batches(num: int, order: list[str]) -> Iterator[tuple[torch.Tensor, str]]:
    for number in range(num):
        order.append(f"read {number}")
        yield torch.full((64,), number), f"batch {number}"


def trained(num: int, order: list[str]) -> StreamCheck:
    with shoal.check_streams(raises=False) as check:
        for tensor, name in ahead_on(torch.device("cpu"), batches(num, order)):
            order.append(name)
            assert (tensor * 2).sum().item() == 128 * int(name.split()[1])
    return check


def test_each_batch_is_copied_before_the_one_ahead_of_it_is_used_and_waited_for() -> None:
    order: list[str] = []
    check = trained(3, order)
    assert check.findings == [] and check.num_operations > 6
    assert order == ["read 0", "read 1", "batch 0", "read 2", "batch 1", "batch 2"]


def test_a_batch_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyDone, "wait", lambda copied: None)
    assert trained(3, []).findings


def test_on_a_cpu_batches_are_handed_out_as_they_are_read() -> None:
    order: list[str] = []
    for _, name in ahead_on(torch.device("cpu"), batches(2, order)):
        order.append(name)
    assert order == ["read 0", "batch 0", "read 1", "batch 1"]


def test_the_position_counts_what_was_handed_out_not_what_was_copied_ahead() -> None:
    data = TokenStream(InMemorySource([list(range(1, 200))]), 8)
    plain = [batch.tokens.tolist() for batch in Loader(data, 2)]
    with shoal.check_streams():
        loader = Loader(data, 2, device=torch.device("cpu"))
        for number, batch in enumerate(loader):
            assert loader.position == 2 * (number + 1)
            assert batch.tokens.tolist() == plain[number]


class CountingSource(InMemorySource):
    """Counts the reads of this process."""

    num_reads = 0

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        self.num_reads += 1
        return super().tokens(index, start, stop)


def reads_before_batches(source: CountingSource, loader: Loader) -> list[int]:
    """What this process has read when each of the first batches is handed out, and computing can begin."""
    return [source.num_reads for _ in zip(range(4), loader, strict=False)]


def quickstart() -> tuple[CountingSource, TokenStream]:
    source = CountingSource([np.arange(200)])
    return source, split([source], 0.05, 8)[0]


def test_with_workers_the_process_that_trains_reads_no_token() -> None:
    source, stream = quickstart()
    assert reads_before_batches(source, Loader(stream, 2, num_workers=1)) == [0, 0, 0, 0]


def test_a_batch_that_is_copied_ahead_was_read_before_the_step_ahead_of_it() -> None:
    source, stream = quickstart()
    with shoal.check_streams():
        reads = reads_before_batches(source, Loader(stream, 2, device=torch.device("cpu")))
    assert reads == [4, 6, 8, 10]  # two samples of one piece in each batch, of which one more was read


def test_on_a_cpu_without_workers_each_batch_is_read_when_it_is_asked_for() -> None:
    source, stream = quickstart()
    assert reads_before_batches(source, Loader(stream, 2, device=torch.device("cpu"))) == [2, 4, 6, 8]


class PrefetchingSource(InMemorySource):
    """Records what is asked for, and what it was told of before."""

    def __init__(self) -> None:
        super().__init__([np.arange(50), np.arange(150)])
        self.told: list[tuple[int, int, int | None]] = []
        self.asked: list[tuple[int, int, int | None]] = []

    def prefetch(self, index: int, start: int = 0, stop: int | None = None) -> None:
        self.told.append((index, start, stop))

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        self.asked.append((index, start, stop))
        return super().tokens(index, start, stop)


def test_the_next_batch_is_read_from_disk_while_one_is_computed() -> None:
    source = PrefetchingSource()
    loader = Loader(split([source], 0.05, 8)[0], 2)
    num_first = 0
    for number, _ in enumerate(loader):
        num_first = num_first or len(source.asked)  # the first batch is read when it is asked for
        is_last = number == len(loader) - 1
        assert source.told[: len(source.asked) - num_first] == source.asked[num_first:]
        assert (len(source.told) > len(source.asked) - num_first) != is_last
    assert source.told == source.asked[num_first:]
