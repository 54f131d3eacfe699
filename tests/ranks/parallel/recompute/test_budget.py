"""``activation_checkpointing.memory_budget``: as few blocks are recomputed as the budget needs, alike on all ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, fake_world
from shoal.errors import ConfigError
from shoal.mesh import Mesh
from shoal.parallel.activations import HostActivations
from shoal.parallel.recompute import Recompute
from shoal.parallel.recompute_blocks import BudgetedRecompute, choose, device_nbytes
from shoal.sharding.placement import Tier
from tests.helpers.slow_copies import SlowCopies
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


@pytest.mark.parametrize(
    ("units", "every", "calls"),
    [
        # kept blocks x 5 units, two that are copied x 5, inputs of recomputed ones and the activations of one
        (5 * BLOCKS - 1, 1, [1, 1, 1, 1, 1, 1]),  # 2 offloaded
        (2 * 5, 1, [1, 1, 1, 1, 1, 1]),  # all
        (2 * 5 + 3 + 5, 2, [1, 2, 1, 2, 1, 2]),
        (2 * 5 + 2 + 5 + 5, 2, [1, 2, 1, 2, 1, 1]),
        (5 * BLOCKS, 1, [1, 1, 1, 1, 1, 1]),  # none
        (5 * 3 + 5 + 3, 4, [2, 2, 2, 1, 1, 1]),  # where offload would leave more to recompute
        (9, 2, [2, 2, 2, 2, 2, 2]),  # less than two blocks
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_are_offloaded_in_place_of_some_recomputation_and_the_numbers_stay(
    units: int, every: int, calls: list[int], stage: int
) -> None:
    plain = run_ranks(2, lambda: train({}, stage))
    found = run_ranks(2, lambda: train({"memory_budget": units * UNIT, "offload_every": every}, stage))
    for (made, values), (_, expected) in zip(found, plain, strict=True):
        assert made == calls
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_what_is_offloaded_leaves_the_device_and_comes_back_with_the_same_bits() -> None:
    tower, copies, hidden = make(Tower), SlowCopies(), torch.randn(ROWS, WIDTH)
    tower(hidden).backward()
    expected = [parameter.grad.clone() for parameter in tower.parameters() if parameter.grad is not None]
    recompute, budget = Recompute(), (2 * 5 + 3 + 5) * UNIT
    ours = BudgetedRecompute(recompute, budget, 2)
    blocks = ours.install(tower, None)
    ours.offload = host = HostActivations(tower, only=ours.blocks, copies_of=lambda _: copies)
    for step in range(3):
        tower.zero_grad()
        copies.log.clear()
        loss = tower(hidden)
        out = [line for line in copies.log if "out" in line]
        on_host, inputs = host.saved_bytes_by_tier(), recompute.saved_bytes
        loss.backward()
        found = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert copies.num_late == 0
        if step:
            assert list(ours.policies.values()) == ["offload", "recompute"] * 3
            assert (on_host, inputs) == ({Tier.HOST: 3 * 5 * UNIT}, 3 * UNIT)
            # Two tensors of a block. Those of the first have left before the third is copied: two are on the device.
            assert [line.split()[0] for line in out] == ["out"] * 4 + ["wait"] * 2 + ["out"] * 2
        with fake_world(1) as world:
            assert (ours.decide(world.communicator("world", Mesh.of(1))) is None) == bool(step)
    sizes = ({name: pair[at] for name, pair in ours.saved.items()} for at in (0, 1))
    assert device_nbytes(ours.policies, *sizes) == budget
    blocks.remove()


def test_whatever_the_budget_it_is_kept_and_offload_leaves_no_more_to_recompute() -> None:
    inputs, whole = ({str(at): size for at in range(12)} for size in (1, 7))
    for budget in range(12 * 7 + 1):
        without = choose(inputs, whole, budget)
        for every in (1, 2, 3, 5):
            made = choose(inputs, whole, budget, every)
            left = [list(each.values()).count("recompute") for each in (made, without)]
            assert left[0] <= left[1]
            assert device_nbytes(made, inputs, whole) <= budget or left[0] == 12
            where = [at for at, policy in enumerate(made.values()) if policy == "offload"]
            assert all(second - first == every for first, second in pairwise(where))


def test_the_rank_with_the_largest_batch_decides_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def rank() -> list[int]:
        return train({"memory_budget": f"{5 * BLOCKS * UNIT}B"}, rows=ROWS * (1 + current_world().rank))[0]

    first, second = run_ranks(2, rank)
    assert first == second == [2] * 5 + [1]
    assert len(re.findall("blocks are recomputed", caplog.text)) == 1


@pytest.mark.parametrize("more", [{"memory_budget": None}, {"offload_activation": {"device": "cpu"}}])
def test_offload_needs_a_budget_of_its_own(more: dict[str, Any]) -> None:
    activation = {"memory_budget": more.pop("memory_budget", "1GiB"), "offload_every": 2}
    with pytest.raises(
        ConfigError, match=r"activation_checkpointing\.offload_every.* (without a|and offload_activation)"
    ):
        shoal.config.load({"train_batch_size": 1, "activation_checkpointing": activation, **more})


@pytest.mark.parametrize("more", [{}, {"compile": {"enabled": True}}, {"parallel": {"pp": 2}}])
def test_what_cannot_be_measured_is_refused(more: dict[str, Any]) -> None:
    budget = "1 GiB" if more else "much"
    settings = {"train_batch_size": 1, "activation_checkpointing": {"memory_budget": budget}, **more}
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.memory_budget"):
        shoal.config.load(settings)
