"""What Muon sends and holds on many ranks: each matrix goes to one of them, and its result comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.models import GPT, GPTConfig
from shoal.simulation.dry_run import StepTime
from tests.helpers.dry_runs import take_steps

SHAPE = GPTConfig(vocab_size=512, sequence_length=64, num_layers=6, hidden_size=256, num_heads=4)
NUMEL = 6 * 12 * 256**2  # of the matrices, 24 of them
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def step_of(rank: int, size: int, zero: dict[str, Any], **more: Any) -> StepTime:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
        **more,
    }
    with shoal.dry_run(size, rank) as run:
        engine, *_ = shoal.initialize(model=GPT(SHAPE), config=config)
        tokens = torch.zeros(1, 64, dtype=torch.long)
        take_steps(run, engine, tokens, 2)
        engine.destroy()
    return run.steps[-1]


@pytest.mark.parametrize("zero", [{}, ON_HOST], ids=["on the device", "on the host"])
def test_a_rank_receives_what_it_orthogonalizes_and_its_shard_of_the_results(zero: dict[str, Any]) -> None:
    size = 4
    received = [step_of(rank, size, zero).received["all_to_all"] for rank in range(size)]
    # fp32 to the owners and 16 bits back, of all but what the owner holds itself: about a quarter
    assert sum(received) == pytest.approx(6 * NUMEL * (size - 1) / size, rel=0.1)
    assert max(received) < 1.5 * sum(received) / size  # as many operations, not as many elements


def test_with_more_ranks_a_rank_receives_and_holds_less() -> None:
    few, many = (step_of(0, size, {}) for size in (4, 24))
    assert many.received["all_to_all"] < few.received["all_to_all"] / 3
    assert many.memory.allocated < few.memory.allocated


def test_parts_of_tensor_parallel_ranks_are_put_together_on_as_many_ranks_as_there_are_matrices() -> None:
    received = [step_of(rank, 6, {"stage": 1}, parallel={"tp": 2}).received["all_to_all"] for rank in range(6)]
    # Twice: over 3 data-parallel ranks, then over 2 tensor-parallel ones; 4 matrices for each of the 6.
    assert sum(received) == pytest.approx(6 * NUMEL * (2 / 3 + 1 / 2), rel=0.05)
    assert max(received) < 1.6 * sum(received) / 6
