"""The 1-bit optimizers' schedules, and what they send in a whole run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shoal.comm.formats import format_named
from shoal.errors import OptimizerError
from shoal.optim.one_bit import OneBitAdam, ZeroOneAdam
from shoal.optim.one_bit_lamb import OneBitLamb
from shoal.optim.sums_values import SumsValues


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def counted(optimizer: SumsValues, steps: int) -> Counter[str]:
    """How often each kind of sum is made."""
    found: Counter[str] = Counter()
    for optimizer.num_steps in range(steps):
        found[optimizer.sums()] += 1
    return found


def share(found: Counter[str]) -> float:
    """The bytes of a run, of those of sums in fp32."""
    rows = torch.ones(1, 1 << 16)
    encoded = sum(part.nbytes for part in format_named("1bit").encode(rows)) / rows.nbytes
    return (found["gradients"] + found["values"] * encoded) / sum(found.values())


def test_one_bit_adam_with_a_warm_up_of_15_percent_sends_a_fifth() -> None:
    found = counted(OneBitAdam(parameters(), freeze_step=1500), 10_000)
    assert found == {"gradients": 1500, "values": 8500}
    assert share(found) < 1 / 5.6


def test_zero_one_adam_sends_a_26th() -> None:
    found = counted(ZeroOneAdam(parameters()), 100_000)
    assert found["gradients"] == 201
    assert share(found) < 1 / 28
    local = ZeroOneAdam(parameters(), var_freeze_step=100, local_step_scaler=50, local_step_clipper=16)
    local.num_steps = 1000
    kinds = [(step, local.sums()) for step in range(1001, 1033) if setattr(local, "num_steps", step - 1) is None]
    assert [step for step, kind in kinds if kind == "values"] == [1008, 1024]
    assert {kind for step, kind in kinds if step % 16} == {"nothing"}


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (OneBitAdam, {"freeze_step": 0}, "freeze_step is 0"),
        (OneBitAdam, {"betas": (1.0, 0.9)}, "betas are"),
        (
            ZeroOneAdam,
            {"local_step_clipper": 0, "var_update_scaler": -1},
            "var_update_scaler is -1.*local_step_clipper",
        ),
        (OneBitLamb, {"factor_min": 5.0}, "factor_min is 5.0 and factor_max 4.0"),
        (OneBitLamb, {"max_coeff": 0.0}, "max_coeff 0.0"),
    ],
)
def test_numbers_outside_their_range_are_named(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OptimizerError, match=said):
        kind(parameters(), **settings)
