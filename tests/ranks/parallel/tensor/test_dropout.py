"""Dropout under tensor parallelism: on whole activations tensor-parallel ranks drop the same elements."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.models.gpt import GPT, GPTConfig
from tests.helpers.training import sgd

Gloo = Callable[..., list[Any]]

ROWS, LENGTH, HIDDEN, VOCABULARY = 2, 8, 32, 50


class Positions(nn.Module):
    """Learned positions, which every rank holds whole, and dropout of what they are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, HIDDEN, dtype=torch.float32, device="cpu"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden + self.weight, 0.5, self.training)


class PositionedGPT(GPT):
    """Dropout before the first block, and in each behind its sums and, of split tensors, inside."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(VOCABULARY, LENGTH, 4, HIDDEN, 4, tied=False, dropout=0.5))
        self.positions = Positions()
        self.embedding.register_forward_hook(lambda module, args, out: self.positions(out))


def _batches() -> Any:
    for index in range(100):
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(index))
        yield tokens[:, :-1], tokens[:, 1:]


def _engine(seed: int, parallel: dict[str, Any]) -> Any:
    _seed(seed)
    model = PositionedGPT()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 1},
        "parallel": parallel,
        **({"pipeline": {"first_stage": ["positions"]}} if "pp" in parallel else {}),
    }
    return shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _states() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(random.getstate()), np.random.get_state()[1].tolist()]


def _step(engine: Any, batches: Any) -> None:
    if engine.axes.get("pp") is not None:
        engine.train_batch(batches)
        return
    for _ in range(3):
        engine.backward(engine(*next(batches)))
        engine.step()


def _train(rank: int, size: int, parallel: dict[str, Any]) -> list[Any]:
    """What tensor-parallel ranks have in common, after two steps."""
    engine, batches = _engine(9 + rank, parallel), _batches()
    before = _states()
    for _ in range(2):
        _step(engine, batches)
    whole = {n: p.tolist() for n, p in engine.module.named_parameters() if n in ("positions.weight", "norm.weight")}
    found = [pp.rank if (pp := engine.axes.get("pp")) is not None else 0, whole, before, _states()]
    engine.destroy()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "tp_sequence_parallel": True}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"tp": 2, "pp": 2, "tp_sequence_parallel": True}),
        (4, {"tp": 4, "tp_grid": "2d"}),
    ],
)
def test_parameters_that_each_rank_holds_whole_stay_equal(gloo: Gloo, size: int, parallel: dict[str, Any]) -> None:
    """The scripts seed each rank differently: the first rank's random states are all ranks'."""
    by_stage: dict[int, list[Any]] = {}
    for stage, *found in gloo(size, _train, parallel):
        by_stage.setdefault(stage, []).append(found)
    assert len(by_stage) == parallel.get("pp", 1)
    for first, *others in by_stage.values():
        assert first[0]
        for other in others:
            assert other == first


def _go_on(rank: int, size: int, folder: str) -> list[Any]:
    """Data-parallel ranks, each with random numbers of its own, save; tensor-parallel ranks go on."""
    data = _engine(9, {})
    _seed(rank)
    data.save_checkpoint(folder)
    saved = _states()
    data.destroy()
    engine = _engine(9, {"tp": size})
    engine.load_checkpoint(folder)
    found = [saved, _states()]
    engine.destroy()
    return found


@pytest.mark.gloo
def test_ranks_that_become_tensor_parallel_go_on_with_the_first_ones_random_states(gloo: Gloo, tmp_path: Path) -> None:
    (first, one), (second, other) = gloo(2, _go_on, str(tmp_path))
    assert first != second
    assert one == other == first
