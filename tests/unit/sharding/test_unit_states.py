"""The states of a unit: which transitions exist, and the memory of each state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from shoal.comm.fake import SingleCommunicator
from shoal.errors import PlacementError
from shoal.sharding.copied_gather import HostStorage
from shoal.sharding.unit import Unit, UnitState
from tests.helpers.param_groups import gathered_group

LEGAL = {
    ("ON_DISK", "FETCHING"),
    ("FETCHING", "SHARDED"),
    ("SHARDED", "GATHERING"),
    ("SHARDED", "ON_DISK"),
    ("GATHERING", "FULL"),
    ("FULL", "SHARDED"),
    ("FULL", "GATHERING"),
}


def unit_of(stage: int, *, is_sharded: bool) -> Unit:
    storage = HostStorage if is_sharded else None
    group = gathered_group([nn.Parameter(torch.ones(4))], SingleCommunicator("dp"), storage, stage=stage)
    return Unit("u", 0, [group])


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations([state.value for state in UnitState], 2)))
def test_a_move_is_made_or_refused_with_the_names_of_both_states(source: str, target: str) -> None:
    unit = unit_of(3, is_sharded=True)
    unit.state = UnitState(source)
    if (source, target) in LEGAL:
        unit._move(UnitState(target))
        assert unit.state.value == target
    else:
        with pytest.raises(PlacementError, match=f"'u' cannot go from {source} to {target}"):
            unit._move(UnitState(target))
        assert unit.state.value == source


def test_a_unit_is_released_and_gathered_again() -> None:
    unit = unit_of(3, is_sharded=True)
    parameter = next(unit.parameters)
    unit.release()
    assert unit.is_released
    assert parameter.isnan().all()
    unit.release()  # once more changes nothing
    unit.gather()
    assert unit.state is UnitState.FULL
    assert parameter.tolist() == [1.0, 1.0, 1.0, 1.0]
    unit.gather()
    assert unit.state is UnitState.FULL


def test_a_unit_that_is_on_the_way_is_awaited_before_it_is_released() -> None:
    unit = unit_of(3, is_sharded=True)
    unit.release()
    unit.start_gather()
    unit.start_gather()  # it is on the way already
    assert unit.state is UnitState.GATHERING
    unit.release()
    assert unit.is_released


def test_a_unit_that_is_pinned_is_not_released() -> None:
    unit = unit_of(3, is_sharded=True)
    unit.pin_count = 1
    unit.release()
    assert unit.state is UnitState.FULL
    unit.pin_count = 0
    unit.release()
    assert unit.is_released


def test_a_replicated_unit_is_full_for_ever() -> None:
    unit = unit_of(2, is_sharded=False)
    unit.release()
    assert unit.state is UnitState.FULL
    assert repr(unit) == "Unit('u', FULL)"
