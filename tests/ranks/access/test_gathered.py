"""`GatheredParameters`: sharded parameters are gathered inside a block, to be read or changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal import zero
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.models import OddParameters, Plain
from tests.helpers.training import (
    BF16,
    STAGES,
    adamw,
    are_bit_equal,
    config,
    finish,
    make,
    micro_step,
    named,
    run_steps,
    start,
)


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_parameters_are_whole_inside_and_as_before_outside(stage: int) -> None:
    def job() -> tuple[bool, bool, bool]:
        engine = start(OddParameters, config(stage))
        before = make(OddParameters)
        parameters = named(engine)
        block = [p for name, p in parameters.items() if name.startswith("blocks.1.")]
        at_rest = parameters["blocks.1.up.weight"].isnan().all().item()
        with zero.GatheredParameters(block):
            inside = all(
                torch.equal(parameters[n], p) for n, p in before.named_parameters() if n.startswith("blocks.1.")
            )
        with zero.GatheredParameters(parameters["odd"]):
            inside = inside and torch.equal(parameters["odd"], before.odd)
        after = parameters["blocks.1.up.weight"].isnan().all().item()
        engine.destroy()
        return at_rest, inside, after

    assert run_ranks(3, job) == [(stage == 3, True, stage == 3)] * 3


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_changes_of_the_modifier_rank_reach_all_ranks_and_their_main_parameters(
    world: int, stage: int, sections: dict[str, Any]
) -> None:
    def job() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine = start(Plain, config(stage, **sections), adamw)
        rank = current_world().rank
        run_steps(engine, 2)
        weight = named(engine)["blocks.1.up.weight"]
        before = engine.access.full_parameter(weight).clone()
        with zero.GatheredParameters([weight], modifier_rank=world - 1):
            with torch.no_grad():
                weight[:2] = 7.0 if rank == world - 1 else -1.0  # only the modifier's counts
        master = engine.access.full_parameter(weight).clone()
        run_steps(engine, 1, first=2)
        engine.destroy()
        return before, master, weight.detach().clone()

    for before, master, weight in run_ranks(world, job):
        assert (master[:2] == 7.0).all()
        assert torch.equal(master[2:], before[2:])  # to the bit, though the 16-bit weights are coarser
        assert not weight.isnan().any()
        assert (weight[:2] > 6.9).all()


def test_without_a_modifier_rank_changes_of_sharded_parameters_are_lost() -> None:
    def job() -> torch.Tensor:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        with (
            pytest.raises(UserWarning, match="the changes are lost"),
            zero.GatheredParameters(weight),
            torch.no_grad(),
        ):
            weight.fill_(7.0)
        value = engine.access.full_parameter(weight).clone()
        engine.destroy()
        return value

    for value in run_ranks(2, job):
        assert torch.equal(value, make(Plain).blocks[1].up.weight)


@pytest.mark.parametrize("world", [2, 3])
def test_what_was_made_of_gathered_parameters_outlives_the_block(world: int) -> None:
    def job() -> tuple[Any, ...]:
        engine = start(OddParameters, config(3), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        with zero.GatheredParameters([weight]):
            kept = weight.detach()
            wanted = weight.detach().clone()
        run_steps(engine, 1, first=1)
        with zero.GatheredParameters([weight]):
            now = weight.detach().clone()
        storages = {group.buffer.full.untyped_storage().nbytes() for group in engine.sharded.unit_of[id(weight)].groups}
        master = engine.access.full_parameter(weight).clone()
        engine.destroy()
        return kept, wanted, now, master, storages

    for kept, wanted, now, master, storages in run_ranks(world, job):
        assert torch.equal(kept, wanted)
        assert not torch.equal(now, wanted)
        assert torch.equal(now, master)
        assert storages == {0}


def test_gathered_parameters_use_the_same_memory_without_other_references() -> None:
    def job() -> bool:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        buckets = [group.buffer for group in engine.sharded.unit_of[id(weight)].groups]
        before = [bucket.full for bucket in buckets]
        for _ in range(2):
            with zero.GatheredParameters([weight]):
                weight.sum().item()
            run_steps(engine, 1)
        same = all(bucket.full is full for bucket, full in zip(buckets, before, strict=True))
        engine.destroy()
        return same

    assert run_ranks(2, job) == [True, True]


def test_gathered_parameters_nest_and_hold_until_the_outermost_ends() -> None:
    def job() -> list[str]:
        engine = start(Plain, config(3))
        unit = next(unit for unit in engine.sharded.units if unit.name == "blocks.0")
        parameters = list(engine.module.blocks[0].parameters())
        states = [unit.state.value]
        with zero.GatheredParameters(parameters):
            with zero.GatheredParameters(parameters[:1]):
                states.append(unit.state.value)
            states.append(unit.state.value)
            run_steps(engine, 1)  # training inside changes nothing
            states.append(unit.state.value)
        states.append(unit.state.value)
        engine.destroy()
        return states

    assert run_ranks(2, job) == [["SHARDED", "FULL", "FULL", "FULL", "SHARDED"]] * 2


def test_training_while_parameters_are_gathered_gives_the_same_numbers() -> None:
    def job(holds: bool) -> dict[str, torch.Tensor]:
        engine = start(Plain, config(3))
        for step in range(3):
            with zero.GatheredParameters(engine.module.parameters(), enabled=holds):
                micro_step(engine, step)
        return finish(engine, []).parameters

    for held, plain in zip(run_ranks(2, job, True), run_ranks(2, job, False), strict=True):
        assert are_bit_equal(held, plain)


def test_gathered_parameters_takes_parameters_only() -> None:
    with pytest.raises(UsageError, match="got int"):
        zero.GatheredParameters(3)
    with pytest.raises(UsageError, match="got str"):
        zero.GatheredParameters(["weight"])
