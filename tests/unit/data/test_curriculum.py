"""Schedules of difficulty and of layer drop: what they say at each step, and what makes none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shoal.config import load
from shoal.data.curriculum import CurriculumScheduler
from shoal.errors import AssertedUsageError, ConfigError, UsageError
from shoal.models.layer_drop import ProgressiveLayerDrop


def scheduler(kind: str, low: int, high: int, **how: Any) -> CurriculumScheduler:
    return CurriculumScheduler(
        {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": how}
    )


def test_linear_grows_in_multiples_of_the_step() -> None:
    linear = scheduler("fixed_linear", 2, 10, total_curriculum_step=8, difficulty_step=2)
    assert [linear.update_difficulty(step) for step in range(1, 12)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10, 10]


def test_a_root_grows_faster_at_first() -> None:
    root = scheduler("fixed_root", 8, 72, total_curriculum_step=16, difficulty_step=8, root_degree=2)
    # 8 + 64 sqrt(step / 16), down to a multiple of 8
    assert [root.get_difficulty(step) for step in (0, 1, 2, 3, 4, 8, 15, 16, 17)] == [8, 24, 24, 32, 40, 48, 64, 72, 72]


def test_discrete_difficulties_hold_until_their_step() -> None:
    discrete = scheduler("fixed_discrete", 1, 5, difficulty=[1, 2, 3, 5], max_step=[2, 4, 6])
    assert [discrete.update_difficulty(step) for step in range(1, 9)] == [1, 1, 2, 2, 3, 3, 5, 5]


@pytest.mark.parametrize(("low", "multiple", "first"), [(8, 16, 16), (64, 16, 64), (10, 8, 16), (100, 64, 128)])
def test_no_step_is_easier_than_the_beginning_and_all_are_multiples(low: int, multiple: int, first: int) -> None:
    for kind, more in (("fixed_linear", {}), ("fixed_root", {"root_degree": 2})):
        made = scheduler(kind, low, 1024, total_curriculum_step=100, difficulty_step=multiple, **more)
        found = [made.get_difficulty(step) for step in range(101)]
        assert found[0] == first and found[-1] == 1024
        assert found == sorted(found) and all(each % multiple == 0 for each in found)


def test_the_end_is_the_end_even_where_it_is_no_multiple() -> None:
    assert (
        scheduler("fixed_linear", 16, 1000, total_curriculum_step=100, difficulty_step=16).get_difficulty(200) == 1000
    )
    assert scheduler("fixed_linear", 10, 12, total_curriculum_step=100, difficulty_step=8).get_difficulty(1) == 12


def test_what_has_reached_the_end_stays_there() -> None:
    made = scheduler("custom", 4, 16)
    made.set_custom_get_difficulty(lambda step: [4, 8, 16, 4][step])
    assert [made.update_difficulty(step) for step in range(4)] == [4, 8, 16, 16]
    assert made.get_difficulty(3) == 4


def test_the_state_goes_from_one_to_another() -> None:
    first = scheduler("fixed_linear", 2, 10, total_curriculum_step=8, difficulty_step=2)
    first.update_difficulty(4)
    second = scheduler("fixed_linear", 2, 20, total_curriculum_step=8, difficulty_step=2)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second.get_current_difficulty() == 6
    assert second.update_difficulty(8) == 10
    second.set_current_difficulty(2)
    assert second.get_state() == {
        "min_difficulty": 2, "max_difficulty": 10, "current_difficulty": 2, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
    }  # fmt: skip


def test_a_custom_schedule_without_a_function_says_so() -> None:
    with pytest.raises(UsageError, match="no function was set") as caught:
        scheduler("custom", 4, 16).update_difficulty(1)
    assert caught.value.code == "curriculum-custom"


LINEAR = {"total_curriculum_step": 8, "difficulty_step": 2}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no beginning": ({"min_difficulty": None}, "min_difficulty: missing"),
    "backwards": ({"min_difficulty": 99}, "min_difficulty: 99, which is more than max_difficulty = 10"),
    "no kind": ({"schedule_type": None}, "schedule_type: missing"),
    "no such kind": ({"schedule_type": "fixed_sine"}, 'schedule_type: "fixed_sine" is no schedule'),
    "no total": ({"schedule_config": {"difficulty_step": 2}}, "schedule_config.total_curriculum_step: missing"),
    "no root": ({"schedule_type": "fixed_root"}, "schedule_config.root_degree: missing, and fixed_root needs it"),
    "step 0": ({"schedule_config": LINEAR | {"difficulty_step": 0}}, "schedule_config.difficulty_step: 0 is no"),
    "as many ends as levels": (
        {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [3, 4]}},
        "schedule_config.max_step: 2 steps for 2 difficulties",
    ),
    "ends that go down": (
        {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2, 3], "max_step": [4, 3]}},
        r"schedule_config.max_step: \[4, 3\] goes down",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_schedule_is_refused_in_the_config_and_by_the_class(case: str) -> None:
    change, said = WRONG[case]
    right = {"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "fixed_linear", "schedule_config": LINEAR}
    wrong = {key: value for key, value in {**right, **change}.items() if value is not None}
    with pytest.raises(AssertedUsageError, match=said):
        CurriculumScheduler(wrong)
    with pytest.raises(ConfigError, match=rf"curriculum_learning\.{said}"):
        load({"curriculum_learning": {"enabled": True, **wrong}})
    load({"curriculum_learning": {"enabled": False, **wrong}})


@pytest.mark.parametrize("theta", [0, 0.1, 0.9, 1.0])
def test_layer_drop_goes_from_all_layers_down_to_theta(theta: float) -> None:
    drop = ProgressiveLayerDrop(theta, 0.01)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in (0, 1, 7, 100, 10**6):
        drop.update_state(step)
        assert drop.get_theta() == pytest.approx((1 - theta) * math.exp(-0.01 * step) + theta, abs=1e-15)
    assert drop.get_theta() == theta
