"""Workers of a loader that die lose nothing and repeat nothing; one that raises says where."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import InMemorySource, Loader, TokenStream
from shoal.errors import UsageError

NUM = 24


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample has its index and a random number; ``fault`` is called with the index before it is read."""

    def __init__(self, fault: Callable[[int], None] = lambda index: None, numel: int = 2) -> None:
        self._fault, self._numel = fault, numel

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> torch.Tensor:
        self._fault(index)
        return torch.cat([torch.rand(self._numel - 1) + np.random.rand(), torch.tensor([float(index)])])


def dies_once(folder: Path, *indices: int, by: Callable[[], None] | None = None) -> Callable[[int], None]:
    def fault(index: int) -> None:
        flag = folder / str(index)
        if index in indices and not flag.exists():
            flag.touch()
            (by or (lambda: os.kill(os.getpid(), signal.SIGKILL)))()

    return fault


def loader_of(data: Any, num_workers: int = 2) -> Loader:
    return Loader(data, 2, num_workers=num_workers, seed=5)


def epochs(loader: Loader, num: int = 2, between: Callable[[int], None] = lambda number: None) -> list[list[Any]]:
    read = []
    for _ in range(num):
        for batch in loader:
            read.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            between(len(read))
    loader.close()
    return read


@pytest.fixture(scope="module")
def expected() -> list[list[Any]]:
    return epochs(loader_of(Samples()))


@pytest.mark.parametrize("index", [0, 7, 13])
def test_a_worker_that_is_killed_while_it_reads_loses_and_repeats_nothing(
    tmp_path: Path, index: int, expected: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        assert epochs(loader_of(Samples(dies_once(tmp_path, index)))) == expected
    (record,) = caplog.records
    assert "(pid " in record.message and "was killed by SIGKILL (often for lack of memory)" in record.message
    position = next(number for number, batch in enumerate(expected) if index in [row[-1] for row in batch])
    again = re.search(r"the batch at position (\d+) again", record.message)  # the first that has not arrived
    assert again is not None and int(again[1]) in range(position % 2 * 2, 2 * position + 1, 4)


@pytest.mark.parametrize("moment", [1, 5, NUM // 2, NUM // 2 + 1])  # the third: at the end of an epoch
def test_all_workers_may_be_killed_at_any_moment(moment: int, expected: list[list[Any]]) -> None:
    loader = loader_of(Samples())
    before: set[int] = set()

    def kill(number: int) -> None:
        if number == moment:
            before.update(loader._workers.pids)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
        elif number == 2 * NUM // 2:
            assert len(before) == 2 and before.isdisjoint(loader._workers.pids)

    assert epochs(loader, between=kill) == expected


def test_a_worker_that_exits_is_one_that_dies(tmp_path: Path, expected: list[list[Any]]) -> None:
    assert epochs(loader_of(Samples(dies_once(tmp_path, 3, 4, by=lambda: os._exit(3))))) == expected


def test_large_tensors_of_a_dead_worker_are_read_again(tmp_path: Path) -> None:
    numel = 1 << 16  # more than is sent as bytes
    expected = epochs(loader_of(Samples(numel=numel)), num=1)
    assert epochs(loader_of(Samples(dies_once(tmp_path, 9), numel)), num=1) == expected


def test_a_batch_that_kills_each_worker_is_named() -> None:
    def fault(index: int) -> None:
        if index == 11:
            os._exit(1)

    loader = loader_of(Samples(fault))
    with pytest.raises(UsageError, match=r"exit code 1 while it read.*as 3 before") as raised:
        epochs(loader)
    assert raised.value.code == "data-worker-died" and "sample 11" in raised.value.where
    loader.close()


def test_an_error_in_a_worker_is_that_of_the_data_with_the_place_and_ends_no_worker() -> None:
    class Broken(TokenStream):
        def __getitem__(self, key: Any) -> Any:
            if key == self.keys(5)[0]:
                raise OSError("disk")
            return super().__getitem__(key)

    data = Broken(InMemorySource([np.arange(9), np.arange(200)], "notes"), 8, packing="greedy")
    for num_workers in (0, 2):
        loader = loader_of(data, num_workers)
        with pytest.raises(OSError, match=r"^disk\n") as raised:
            epochs(loader)
        (note,) = [each for each in raised.value.__notes__ if each.startswith("while reading")]
        assert f"of document {data.pieces(data.keys(5)[0])[0].document} (notes, at " in note
        if num_workers:
            before = loader._workers.pids
            assert any("in worker" in each and "Traceback" in each for each in raised.value.__notes__)
            with pytest.raises(OSError, match=r"^disk\n"):
                epochs(loader)
            assert loader._workers.pids == before
            loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_is_timed_by_source(num_workers: int) -> None:
    class Slow(InMemorySource):
        def tokens(self, index: int, start: int = 0, stop: int | None = None) -> Any:
            time.sleep(0.01)
            return super().tokens(index, start, stop)

    data = TokenStream([InMemorySource([np.arange(20)], "fast"), Slow([np.arange(20)], "slow")], 8, packing="greedy")
    loader = loader_of(data, num_workers)
    num_samples = 2 * len([*loader])
    loader.close()
    assert set(loader.source_seconds) == {"fast", "slow"}
    assert loader.source_seconds["slow"] > max(0.01 * num_samples / 2 - 0.001, 4 * loader.source_seconds["fast"])


def test_an_error_that_cannot_be_sent_keeps_its_text() -> None:
    class OwnError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fault(index: int) -> None:
        raise OwnError(1, 2)

    loader = loader_of(Samples(fault), 1)
    with pytest.raises(RuntimeError, match="OwnError: 1 and 2"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_position_saved_while_workers_are_ahead_is_resumed_with_any_number(workers: int) -> None:
    class Plain(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

    whole = epochs(loader_of(Plain()))
    first = loader_of(Plain())
    batches: Iterator[Any] = iter(first)
    begin = [next(batches).tolist() for _ in range(3)]
    os.kill(first._workers.pids[0], signal.SIGKILL)
    second = loader_of(Plain(), workers)
    second.load_state_dict(first.state_dict())
    first.close()
    assert begin + epochs(second) == whole


def test_batches_and_requests_that_fill_a_socket_do_not_block_each_other() -> None:
    class Many(Samples):
        def __len__(self) -> int:
            return 200_000

        def __getitem__(self, index: int) -> Any:
            return index

    loader = Loader(Many(), 40_000, num_workers=1, shuffle=False, collate_fn=lambda samples: [*samples] * 4)
    assert [batch[0] for batch in loader] == list(range(0, 200_000, 40_000))
    loader.close()


def test_workers_end_with_the_process_that_reads(tmp_path: Path) -> None:
    """Also if it is killed, and workers hold each other's sockets open."""
    pids = tmp_path / "pids"
    main = os.fork()
    if not main:
        loader = loader_of(Samples(), 3)
        next(iter(loader))
        pids.write_text(" ".join(map(str, loader._workers.pids)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(main, 0)
    for pid in map(int, pids.read_text().split()):
        wait_until_gone(pid)


def test_a_forked_process_that_drops_the_loader_leaves_the_workers_alone(expected: list[list[Any]]) -> None:
    loader = loader_of(Samples())
    batches = iter(loader)
    first = next(batches)
    child = os.fork()
    if not child:
        try:
            loader._workers.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    found = [batch.tolist() for batch in (first, *batches)]
    loader.close()
    assert found == expected[: len(loader)]


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
