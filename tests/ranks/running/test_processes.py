"""Ranks as processes give the bits of ranks as threads, and end together when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.gloo_pool import GlooRankError
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, are_bit_equal, config, run_steps, start, train, train_ranks

pytestmark = pytest.mark.gloo


def settings_of(stage: int) -> dict[str, Any]:
    zero = {"mics_shard_size": 2} if stage == 4 else {}
    return config(
        min(stage, 3),
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        bf16={"enabled": True},
        zero_optimization=zero,
    )


def train_here(rank: int, size: int, stage: int) -> dict[str, Any]:
    trained = train(Plain, settings_of(stage), steps=3)
    return {"losses": trained.losses, "main_parameters": trained.main_parameters}


@pytest.mark.parametrize("world", [2, 4])
def test_processes_give_the_bits_of_threads(gloo: Callable[..., Any], world: int) -> None:
    for stage in STAGES if world == 2 else (3, 4):  # 4: hybrid sharding
        threads = train_ranks(world, Plain, settings_of(stage), steps=3)
        processes = gloo(world, train_here, stage)
        for ours, theirs in zip(processes, threads, strict=True):
            assert ours["losses"] == theirs.losses
            assert are_bit_equal(ours["main_parameters"], theirs.main_parameters)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad sample on rank 1")


def fail_in_backward(rank: int, size: int, stage: int) -> None:
    engine = start(Plain, config(stage))
    run_steps(engine, 2)
    if rank == 1:
        engine.module.blocks[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
    try:
        run_steps(engine, 1, first=2)
    except ValueError as error:
        engine.world.report_failure(error)  # what happens by itself where nobody catches it
        raise


@pytest.mark.parametrize("stage", [0, 3])
def test_a_process_that_fails_in_backward_stops_the_others_with_its_traceback(
    gloo: Callable[..., Any], stage: int
) -> None:
    began = time.monotonic()
    with pytest.raises(GlooRankError) as caught:
        gloo(2, fail_in_backward, stage)
    assert "a bad sample on rank 1" in caught.value.tracebacks[1]
    assert "RankFailedError" in caught.value.tracebacks[0]
    assert "a bad sample on rank 1" in caught.value.tracebacks[0]
    assert time.monotonic() - began < 30
