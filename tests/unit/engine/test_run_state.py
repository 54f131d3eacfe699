"""What is beside the tensors: a manifest that lies about it is refused before anything changes, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engine.run_state import check

GENERATORS = {"torch": 0, "python": {"words": 0}, "numpy": {"keys": 0}}
OWN: dict[str, Any] = {"generators": GENERATORS, "buffers": {}, "gradients": [], "losses": [], "styles": []}
SHARED: dict[str, Any] = {"counters": {"global_steps": 3}, "schedule": None, "layout": [[]]}


def test_what_an_engine_saves_is_taken() -> None:
    check(SHARED, OWN)
    check(SHARED, None)


@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ({"counters": {"global_steps": "x"}}, {}),
        ({"counters": {"global_steps": True}}, {}),
        ({"schedule": [1]}, {}),
        ({}, {"generators": {}}),
        ({}, {"gradients": [{"bucket": 1}]}),
        ({}, {"gradients": [{"bucket": -1}]}),
        ({}, {"gradients": [5]}),
    ],
)
def test_what_no_engine_saves_is_refused(shared: dict[str, Any], own: dict[str, Any]) -> None:
    with pytest.raises((TypeError, KeyError)):
        check(SHARED | shared, OWN | own)
