"""Copies of batches run next to the step before, and the step waits for its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.comm.side_stream import CopyDone
from shoal.data import InMemorySource, Loader, TokenStream, ahead_on
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
