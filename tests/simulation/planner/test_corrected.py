"""Measured times correct the plans that share values with what was measured."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.planner.corrected import corrected


def test_without_measurements_a_plan_stays_as_it_is() -> None:
    one, other = corrected([({"stage": 1}, 2.0), ({"stage": 3}, 5.0)], [])
    assert (one.seconds, other.seconds) == (2.0, 5.0)
    assert one.deviation == other.deviation == pytest.approx(math.hypot(1.0, 0.15))
    assert corrected([], []) == []


def test_what_was_measured_is_known_and_others_follow_by_the_values_that_they_share() -> None:
    plans = [{"stage": stage, "micro": micro} for stage in (1, 3) for micro in (1, 8)]
    # Stage 3 takes twice its plan, stage 1 what is planned: micro = 8 was measured at both.
    ran = [(plans[1], 1.0, 1.0), (plans[3], 1.0, 2.0)]
    same, at_1, at_3 = corrected([(plans[1], 1.0), (plans[0], 1.0), (plans[2], 1.0)], ran)
    assert same.seconds == pytest.approx(1.0, rel=0.02) and same.deviation < 0.03
    assert at_3.seconds / at_1.seconds > 1.5
    assert at_1.deviation == pytest.approx(at_3.deviation) and at_1.deviation > 0.1
    assert at_1.at_best(2.0) == pytest.approx(at_1.seconds * math.exp(-2 * at_1.deviation))


def test_mean_and_deviation_are_those_of_a_linear_regression_with_normal_terms() -> None:
    values = [{"a": a, "b": b} for a in "xy" for b in "uvw"]
    rows = torch.tensor([[1.0, *(one["a"] == a for a in "xy"), *(one["b"] == b for b in "uvw")] for one in values])
    prior = torch.diag(torch.tensor([1.0, *[0.15**2] * 5])).double()
    ratios = torch.tensor([0.1, -0.2, 0.3]).double()
    seen, rest = rows[:3].double(), rows[3:].double()
    precision = torch.linalg.inv(prior) + seen.T @ seen / 0.03**2
    covariance = torch.linalg.inv(precision)
    mean = covariance @ seen.T @ ratios / 0.03**2
    ran = [(one, 2.0, 2.0 * math.exp(ratio)) for one, ratio in zip(values, ratios.tolist(), strict=False)]
    for found, row in zip(corrected([(one, 1.0) for one in values[3:]], ran), rest, strict=True):
        assert math.log(found.seconds) == pytest.approx((row @ mean).item(), abs=1e-6)
        assert found.deviation == pytest.approx((row @ covariance @ row).sqrt().item(), rel=1e-6)
