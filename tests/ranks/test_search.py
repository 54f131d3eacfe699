"""Random cases of small models train as plain PyTorch does; Transformers' models: tests/clients, more: test-nightly."""

from __future__ import annotations

import json

import pytest

from tests.search import run as running
from tests.search.cases import draw
from tests.search.models import FAMILIES

OWN = tuple(name for name in FAMILIES if name.startswith("own"))
SEEDS = range(100, 125)

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_case_ends_as_in_plain_pytorch_or_is_refused(seed: int) -> None:
    case = draw(seed, OWN)
    outcome = running.run(case)
    assert outcome.kind in ("equal", "refused", "warned"), f"{json.dumps(case)}: {outcome.what}\n{outcome.details}"


def test_a_parameter_that_ends_elsewhere_is_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    right = running.optimizer_options
    monkeypatch.setattr(running, "optimizer_options", lambda case: {**right(case), "lr": 0.0102})  # the reference's
    outcome = running.run({"model": "own", "dp": 2})
    assert outcome.kind == "wrong", outcome
    assert "in place of" in outcome.what
