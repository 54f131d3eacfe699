"""A run under elasticity that stops on 2 ranks goes on with 3, 6 or 1: the same global batches, the same losses."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import shoal
from shoal.comm.threads import run_ranks
from shoal.data import RepeatingLoader
from tests.helpers.models import SEQUENCE, VOCABULARY
from tests.helpers.resuming import Run, engine_of, two_blocks
from tests.helpers.training import adamw, config

ELASTICITY = {"enabled": True, "max_train_batch_size": 13, "micro_batch_sizes": [1, 2], "max_gpus": 8, "version": 0.1}
STOP, END = 3, 6


class Rows(Dataset[torch.Tensor]):
    """Rows of tokens, and which row each is."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator), index


def elastic(stage: int) -> dict[str, Any]:
    made = config(stage, elasticity=ELASTICITY, gradient_clipping=1.0)
    del made["train_micro_batch_size_per_gpu"]
    return made


def steps(engine: shoal.Engine, count: int) -> tuple[list[float], list[list[int]]]:
    """Whole steps. Returns: this rank's share of each step's mean loss, and the rows that it saw in it."""
    batches = iter(RepeatingLoader(engine.training_dataloader))
    losses, seen = [], []
    for _ in range(count):
        total, rows = 0.0, []
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, numbers = next(batches)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) * len(tokens) / engine.train_batch_size()
            rows += numbers.tolist()
        losses.append(total)
        seen.append(rows)
    return losses, seen


def train(stage: int, ranks: int, folder: Path, count: int, *, loads: bool = False, saves: bool = False) -> Any:
    """Returns: the mean loss and the sorted rows of each step, and the sizes of its batches."""

    def rank() -> Any:
        engine = engine_of(Run(elastic(stage), ranks, two_blocks, adamw, seed=int(loads)), training_data=Rows())
        if loads:
            engine.load_checkpoint(folder)
        losses, seen = steps(engine, count)
        if saves:
            engine.save_checkpoint(folder)
        micro_batch, num_micro = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        sizes = engine.train_batch_size(), micro_batch, num_micro
        engine.destroy()
        return losses, seen, sizes

    results = run_ranks(ranks, rank)
    losses = [sum(shares) for shares in zip(*(losses for losses, _, _ in results), strict=True)]
    rows = [sorted(chain(*shares)) for shares in zip(*(seen for _, seen, _ in results), strict=True)]
    return losses, rows, results[0][2]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_stop_on_2_ranks_goes_on_with_other_numbers_of_ranks(stage: int, tmp_path: Path) -> None:
    straight, rows, sizes = train(stage, 2, tmp_path, END)
    assert sizes == (12, 2, 3)
    train(stage, 2, tmp_path, STOP, saves=True)
    for ranks, expected in ((3, (12, 2, 2)), (6, (12, 2, 1)), (1, (12, 2, 6)), (4, (12, 1, 3))):
        losses, seen, sizes = train(stage, ranks, tmp_path, END - STOP, loads=True)
        assert sizes == expected
        assert seen == rows[STOP:]
        assert losses == pytest.approx(straight[STOP:], abs=1e-5), ranks
