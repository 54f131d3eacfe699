"""Vocabulary parallel cross entropy against torch's on all logits: loss, gradient, memory, bad targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import RankFailedError
from shoal.parallel.loss import linear_cross_entropy, sequence_parallel_cross_entropy
from shoal.parallel.tensor import vocab_parallel_cross_entropy
from shoal.parallel.tensor.parts import even_range
from tests.helpers.live_storages import LiveStorages
from tests.helpers.tensor_cases import tp_communicator

ROWS = (3, 5)


def on_ranks(size: int, vocab_size: int, logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> None:
    whole = logits.clone().requires_grad_()
    by_class = {"mean": (), "sum": (), "none": ROWS}[options.get("reduction", "mean")]
    expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), **options).view(by_class)
    weights = torch.linspace(0.5, 2.0, max(expected.numel(), 1)).view(by_class)
    (expected * weights).sum().backward()
    assert whole.grad is not None

    def on_a_rank() -> None:
        comm = tp_communicator()
        start, stop = even_range(vocab_size, comm.size, comm.rank)
        mine = logits[..., start:stop].clone().requires_grad_()
        with current_world().recorder.recording() as calls:
            loss = vocab_parallel_cross_entropy(mine, targets, comm, vocab_size, **options)
            (loss * weights).sum().backward()
        num_numbers = 4 if options.get("label_smoothing") else 2
        received = (size - 1) * num_numbers * targets.numel() * 4
        assert [(call.op, call.nbytes) for call in calls] == [("all_gather", received)]
        assert mine.grad is not None
        assert mine.grad.dtype == logits.dtype
        rtol, atol = (1e-5, 1e-6) if logits.dtype == torch.float32 else (1e-2, 1e-3)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[..., start:stop], rtol=rtol, atol=atol)

    run_ranks(size, on_a_rank)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_it_is_torchs_cross_entropy(size: int, reduction: str, label_smoothing: float) -> None:
    logits = 20 * torch.randn(*ROWS, 67)
    targets = torch.randint(0, 67, ROWS)
    targets[0, 1] = targets[2, 3] = -100
    on_ranks(size, 67, logits, targets, reduction=reduction, label_smoothing=label_smoothing)


def test_gpt2s_vocabulary_and_bfloat16() -> None:
    on_ranks(4, 50257, torch.randn(*ROWS, 50257).bfloat16(), torch.randint(0, 50257, ROWS), ignore_index=7)


def test_large_logits_overflow_nothing() -> None:
    logits = torch.zeros(*ROWS, 8)
    logits[..., 6] = 500.0
    logits[..., 1] = -500.0
    on_ranks(2, 8, logits, torch.arange(15).view(ROWS) % 8)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("is_split", [True, False])
def test_it_holds_one_fp32_tensor_of_the_logits_shape_and_another_to_convert(
    is_split: bool, dtype: torch.dtype, most: int
) -> None:
    rows, width = 64, 500

    def on_a_rank() -> int:
        comm = tp_communicator()
        logits = torch.randn(rows, width, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, width, (rows,))
        with LiveStorages() as storages:
            if is_split:
                loss = vocab_parallel_cross_entropy(logits, targets, comm, 2 * width)
            else:
                loss = sequence_parallel_cross_entropy(logits, targets, comm).sum()
            between = storages.now()
            loss.backward()
        assert between < 0.05 * 4 * rows * width
        return storages.peak

    assert max(run_ranks(2, on_a_rank)) < 1.05 * most * 4 * rows * width


@pytest.mark.parametrize("target", [67, -1])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_target_out_of_the_vocabulary_is_an_error(target: int, is_fused: bool) -> None:
    def on_a_rank() -> None:
        comm = tp_communicator()
        start, stop = even_range(67, comm.size, comm.rank)
        targets = torch.tensor([3, target])
        if is_fused:
            hidden, weight = torch.zeros(2, 8), torch.zeros(stop - start, 8)
            linear_cross_entropy(hidden, weight, targets, comm=comm, vocabulary_start=start)
        else:
            vocab_parallel_cross_entropy(torch.zeros(2, stop - start), targets, comm, 67)

    with pytest.raises((RuntimeError, RankFailedError), match="index"):
        run_ranks(2, on_a_rank)
