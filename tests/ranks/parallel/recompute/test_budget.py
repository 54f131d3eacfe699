"""``activation_checkpointing.memory_budget``: as few blocks are recomputed as the budget needs, alike on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError
from tests.helpers.training import make

WIDTH, ROWS, BLOCKS = 64, 32, 6
UNIT = WIDTH * ROWS * 4  # bytes of one activation


class Widens(nn.Module):
    """Saves its input and the result of tanh, which is four times as large: 5 units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Widens() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def train(activation: dict[str, Any], stage: int = 2, rows: int = ROWS) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The calls of each block's forward in the third step, and the parameters after it."""
    settings = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "activation_checkpointing": activation,
    }  # fmt: skip
    engine = shoal.initialize(model=make(Tower), config=settings)[0]
    for step in range(3):
        for block in engine.module.blocks:
            block.calls = 0
        generator = torch.Generator().manual_seed(10 * step + current_world().rank)
        engine.backward(engine(torch.randn(rows, WIDTH, generator=generator)))
        engine.step()
    calls = [block.calls for block in engine.module.blocks]
    values = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return calls, values


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("units", "num_recomputed"),
    [(5 * BLOCKS, 0), (5 * BLOCKS - 1, 2), (3 * BLOCKS + 1, 4), (0, BLOCKS)],
)
def test_the_last_blocks_that_fit_run_once_and_the_numbers_stay(
    units: int, num_recomputed: int, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = run_ranks(2, lambda: train({}, stage))
    found = run_ranks(2, lambda: train({"memory_budget": units * UNIT}, stage))
    for (calls, values), (once, expected) in zip(found, plain, strict=True):
        assert once == [1] * BLOCKS
        assert calls == [2] * num_recomputed + [1] * (BLOCKS - num_recomputed)
        assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert f"{num_recomputed} of {BLOCKS} blocks are recomputed" in caplog.text
    assert ("more than the" in caplog.text) == (units == 0)


def test_the_rank_with_the_largest_batch_decides_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def rank() -> list[int]:
        return train({"memory_budget": f"{5 * BLOCKS * UNIT}B"}, rows=ROWS * (1 + current_world().rank))[0]

    first, second = run_ranks(2, rank)
    assert first == second == [2] * 5 + [1]
    assert len(re.findall("blocks are recomputed", caplog.text)) == 1


@pytest.mark.parametrize("more", [{}, {"compile": {"enabled": True}}, {"parallel": {"pp": 2}}])
def test_what_cannot_be_measured_is_refused(more: dict[str, Any]) -> None:
    budget = "1 GiB" if more else "much"
    settings = {"train_batch_size": 1, "activation_checkpointing": {"memory_budget": budget}, **more}
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.memory_budget"):
        shoal.config.load(settings)
