"""Changes of the library that keep values and break an order, or let the host wait, are noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.stream_changes import CHANGES, changed, host_reads
from tests.helpers.training import config


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed(name: str) -> None:
    change = CHANGES[name]
    with changed(change.file, change.old, change.new):
        noticed = change.run()
    assert change.says in noticed


@pytest.mark.parametrize("name", {change.run: name for name, change in CHANGES.items()}.values())
def test_without_the_change_nothing_is_reported(name: str) -> None:
    assert CHANGES[name].run() == ""


PRECISIONS: list[dict[str, Any]] = [
    {},
    {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    {"fp16": {"enabled": True, "loss_scale": 8}},
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", PRECISIONS, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_host_waits_for_values_once_a_step(stage: int, more: dict[str, Any], accumulation: int) -> None:
    found = host_reads(config(stage, gradient_accumulation_steps=accumulation, **more))
    assert found.total() == 1, found
    assert "synchronize_status" in next(iter(found))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_optimizer_on_the_host_adds_no_wait(stage: int, accumulation: int) -> None:
    """With accumulation, stages 2 and 3 have the sum of the gradients, and its norm, on the host."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    found = host_reads(config(stage, gradient_accumulation_steps=accumulation, zero_optimization=zero))
    assert found.total() == 1, found
