"""The real engine runs without values: whole steps of any rank of any world, on fake tensors, with their collectives.

And two ways in for later parts: a unit gathered by a caller other than a hook, and the optimizer run unit by unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shoal
from shoal.comm.recorder import Entry
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world, fake_world
from shoal.errors import PlacementError
from shoal.running.step import ShardedStep
from shoal.sharding.unit import Unit, UnitState
from tests.helpers.models import Plain, cross_entropy
from tests.helpers.training import (
    adamw,
    are_bit_equal,
    batch,
    config,
    finish,
    make,
    micro_step,
    run_steps,
    sgd,
    start,
    start_with,
)

VOCABULARY, HIDDEN, BLOCKS = 1024, 256, 3


class Tower(nn.Module):
    """Sizes that divide by 64 x 1,024; embedding and head are large enough to be units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return cross_entropy(self.head(x), targets)


NUMEL = {"embedding": 262_144, "blocks.0": 65_536, "blocks.1": 65_536, "blocks.2": 65_536, "head": 262_144}
FORWARDS = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
BACKWARDS = ["head", "blocks.2", "blocks.1", "blocks.0", "embedding"]

EXPECTED = {
    0: [*(("all_reduce", unit) for unit in BACKWARDS), ("exchange", "step")],
    1: [
        *(("reduce_scatter", unit) for unit in BACKWARDS),
        ("exchange", "step"),
        *(("all_gather", unit) for unit in FORWARDS),
    ],
    2: [
        *(("reduce_scatter", unit) for unit in BACKWARDS),
        ("exchange", "step"),
        *(("all_gather", unit) for unit in FORWARDS),
    ],
    3: [
        *(("all_gather", unit) for unit in FORWARDS),
        *(("all_gather", unit) for unit in BACKWARDS[1:]),  # the head stays gathered
        *(("reduce_scatter", unit) for unit in BACKWARDS),
        ("exchange", "step"),
    ],
}


@contextmanager
def dry_run(size: int, rank: int) -> Iterator[None]:
    with fake_world(size, rank), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def fake_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 128, dtype=torch.long), torch.zeros(2, 128, dtype=torch.long)


def third_step(stage: int, **sections: Any) -> tuple[list[Entry], shoal.Engine]:
    model = Tower()
    engine = shoal.initialize(model=model, optimizer=adamw(model.parameters()), config=config(stage, **sections))[0]
    for step in range(3):
        with current_world().recorder.recording() as entries:
            loss = engine(*fake_tokens())
            engine.backward(loss)
            engine.step()
        assert isinstance(loss, FakeTensor)
        assert engine.global_steps == step + 1
    return entries, engine


@pytest.mark.parametrize(("size", "rank"), [(8, 0), (8, 5), (1024, 1023)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_whole_step_of_any_rank_runs_without_values_and_its_collectives_are_recorded(
    stage: int, size: int, rank: int
) -> None:
    with dry_run(size, rank):
        entries, engine = third_step(stage)
        assert [(entry.op, entry.label) for entry in entries] == EXPECTED[stage]
        for entry in entries:
            if entry.kind == "data":
                times = 2 if entry.op == "all_reduce" else 1
                assert entry.nbytes == times * 4 * NUMEL[entry.label] * (size - 1) // size
        engine.destroy()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dry_run_knows_the_memory_of_a_rank_of_1024(stage: int, precision: str) -> None:
    psi, size = 720_896, 1024
    with dry_run(size, 7):
        _, engine = third_step(stage, **{precision: {"enabled": True}})
        kinds = engine.memory_report().by_kind()
        engine.destroy()
    held = kinds["parameter"] + kinds["gradient"] + kinds["master"] + kinds["optimizer state"]
    assert (
        held
        == {
            0: 16 * psi,
            1: 4 * psi + 12 * psi // size,
            2: 2 * psi + 14 * psi // size,
            3: 16 * psi // size,
        }[stage]
    )


def test_a_dry_run_of_hybrid_sharding_uses_three_axes() -> None:
    with dry_run(64, 9):
        entries, engine = third_step(3, zero_optimization={"mics_shard_size": 8})
        assert {(entry.axis, entry.op) for entry in entries} == {
            ("dp_shard", "all_gather"),
            ("dp_shard", "reduce_scatter"),
            ("dp_replicate", "all_reduce"),
            ("dp", "exchange"),
        }
        engine.destroy()


def test_a_model_of_a_billion_parameters_is_run_dry_in_seconds_and_no_memory() -> None:
    class Large(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False)])
            self.embedding = nn.Embedding(1_000_000, 1024)
            self.down = nn.Linear(1024, HIDDEN)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.head(self.blocks[0](self.down(self.embedding(tokens)))), targets)

    began = time.monotonic()
    with dry_run(256, 3):
        model = Large()
        engine = shoal.initialize(model=model, optimizer=adamw(model.parameters()), config=config(3))[0]
        engine.backward(engine(*fake_tokens()))
        engine.step()
        held = engine.memory_report().by_kind()["parameter"]
        engine.destroy()
    assert 1_000_000 * 1024 * 4 // 256 < held < 1_010_000 * 1024 * 4 // 256
    assert time.monotonic() - began < 20


# A caller other than a hook


def unit_named(engine: shoal.Engine, name: str) -> Unit:
    return next(unit for unit in engine.sharded.units if unit.name == name)


def test_a_unit_is_gathered_and_released_by_any_caller() -> None:
    def job() -> list[str]:
        engine = start(Plain, config(3))
        unit, weight = unit_named(engine, "blocks.1"), engine.module.blocks[1].up.weight
        seen = [unit.state.value]
        unit.start_gather()
        seen.append(unit.state.value)
        unit.gather()
        seen.append(unit.state.value)
        assert torch.equal(weight, make(Plain).blocks[1].up.weight)
        unit.release()
        seen.append(unit.state.value)
        assert weight.isnan().all()
        engine.destroy()
        return seen

    assert run_ranks(2, job) == [["SHARDED", "GATHERING", "FULL", "SHARDED"]] * 2


def test_units_pinned_by_a_schedule_stay_gathered_over_forward_and_backward_and_change_no_number() -> None:
    def job(holds: bool) -> tuple[dict[str, torch.Tensor], int]:
        engine = start(Plain, config(3))
        micro_step(engine, 0)
        units = engine.sharded.units
        with current_world().recorder.recording() as entries, engine.sharded.gathered(units if holds else []):
            micro_step(engine, 1)
            states = {unit.state for unit in units}
        assert states == ({UnitState.FULL} if holds else {UnitState.SHARDED})
        assert {unit.state for unit in units} == {UnitState.SHARDED}
        gathers = sum(entry.op == "all_gather" for entry in entries)
        return finish(engine, []).parameters, gathers

    held, plain = run_ranks(2, job, True), run_ranks(2, job, False)
    for (parameters, gathers), (expected, plain_gathers) in zip(held, plain, strict=True):
        assert are_bit_equal(parameters, expected)
        assert gathers == 4
        assert plain_gathers == 6  # the root and the last block stay gathered


def test_a_move_that_does_not_exist_is_an_error_that_names_the_moves_that_do() -> None:
    def job() -> None:
        engine = start(Plain, config(3))
        with pytest.raises(PlacementError, match=r"'blocks\.0' cannot go from SHARDED to FULL") as caught:
            unit_named(engine, "blocks.0")._move(UnitState.FULL)
        assert "from SHARDED the moves are: GATHERING, ON_DISK" in str(caught.value)
        engine.destroy()

    run_ranks(2, job)


# The optimizer, unit by unit


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_optimizer_can_be_run_unit_by_unit_in_any_order(stage: int, sections: dict[str, Any]) -> None:
    """What offload will do: fetch one unit's state, update it, store it, while the next is under way."""

    def whole() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage, **sections), adamw)
        run_steps(engine, 1)
        return finish(engine, []).parameters

    def by_unit() -> dict[str, torch.Tensor]:
        engine = start(Plain, config(stage, **sections), adamw)
        engine.backward(engine(*batch(0, current_world().rank, 2)))
        step = engine.optimizer.sharded_step
        has_grad = {group: bytes(group.gradient.has_grad) for group in step.groups}
        step.begin()
        try:
            for unit in reversed(engine.sharded.units):
                with torch.no_grad():
                    works = step.update([unit], 1.0, has_grad)
                assert len(works) == (1 if stage in (1, 2) else 0)
                for _, work in works:
                    work.wait()
        finally:
            step.end()
        groups = engine.optimizer.param_groups
        assert [id(p) for p in groups[0]["params"]] == [id(p) for p in engine.module.parameters()]
        engine.zero_grad()
        return finish(engine, []).parameters

    for expected, found in zip(run_ranks(2, whole), run_ranks(2, by_unit), strict=True):
        assert are_bit_equal(found, expected)


def test_a_step_in_small_parts_gives_the_bits_of_a_step_in_one() -> None:
    def job(numel: int) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(2, zero_optimization={"sub_group_size": numel}), sgd)
        run_steps(engine, 3)
        return finish(engine, []).parameters

    whole = run_ranks(2, job, 10**9)
    for numel in (1, 100, 1000):
        assert are_bit_equal(run_ranks(2, job, numel)[0], whole[0])


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_whole_tensors_in_many_calls_that_overlap_have_the_bits_of_one_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> tuple[dict[str, torch.Tensor], list[str]]:
        engine = start(Tower, config(3, optimizer={"type": name, "params": {"lr": 1e-2}}), None)
        generator = torch.Generator().manual_seed(current_world().rank)
        for _ in range(2):
            tokens = torch.randint(VOCABULARY, (2, 2, 16), generator=generator)
            with current_world().recorder.recording() as entries:
                engine.backward(engine(*tokens))
                engine.step()
        return finish(engine, []).parameters, [entry.label for entry in entries if name.lower() in entry.label]

    one = run_ranks(3, job)
    monkeypatch.setattr("shoal.running.step.BATCH_NUMEL", 1)
    many = run_ranks(3, job)
    assert are_bit_equal(many[0][0], one[0][0])
    first, second, last = "muon.updates", "muon.results", "lamb.norms"
    if name == "Muon":
        assert one[0][1] == [first, second]
        assert many[0][1] == [first, first, second, first, second, second]
    else:
        assert (one[0][1], many[0][1]) == ([last], [last] * 5)


def test_an_accelerator_updates_ranges_of_at_most_a_sub_group_and_many_units_in_one_call() -> None:
    calls: list[list[int]] = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            calls.append([p.numel() for group in self.param_groups for p in group["params"]])
            super().step()

    def job(numel: int) -> tuple[list[list[int]], int]:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
        engine = start_with(model, config(2, units={"names": []}), lambda parameters: Recording(parameters, lr=0.1))
        step, groups = engine.sharding.step, engine.sharded.trained_groups
        accelerated = ShardedStep(step.optimizer, groups, block_numel=None, sub_group_numel=numel)
        for group in groups:
            group.gradient.memory()
        has_grad = {group: bytes([1] * len(group.parameters)) for group in groups}
        calls.clear()
        accelerated.begin()
        with torch.no_grad():
            works = accelerated.update(engine.sharded.units, 1.0, has_grad)
        accelerated.end()
        engine.destroy()
        return list(calls), len(works)

    assert run_ranks(1, job, 10**9)[0] == ([[1 << 20] * 3], 3)
    assert run_ranks(1, job, 1)[0] == ([[1 << 19]] * 6, 3)


@pytest.mark.parametrize(("size", "num_ranges"), [(32, 1), (37, 6)])
def test_one_rank_updates_whole_units_and_has_the_bits_of_plain_pytorch(size: int, num_ranges: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(size, size) for _ in range(3)))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    def loss(trained: Any) -> torch.Tensor:
        return trained(torch.ones(2, size)).square().sum()

    def job() -> dict[str, torch.Tensor]:
        engine = start_with(model(), config(2, units={"names": []}), adam)
        assert sum(len(group.ranges) for group in engine.sharded.trained_groups) == num_ranges
        for _ in range(4):
            engine.backward(loss(engine))
            engine.step()
        return finish(engine, []).parameters

    (trained,) = run_ranks(1, job)
    plain = model()
    optimizer = adam(plain.parameters())
    for _ in range(4):
        loss(plain).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_bit_equal(trained, dict(plain.named_parameters()))
