"""Random cases of Transformers' models train as plain PyTorch does; more of them: make test-nightly."""

from __future__ import annotations

import json

import pytest

from tests.search.cases import draw
from tests.search.models import FAMILIES
from tests.search.run import run

pytest.importorskip("transformers")

THEIRS = tuple(name for name in FAMILIES if not name.startswith("own"))
SEEDS = range(200, 230)

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_case_ends_as_in_plain_pytorch_or_is_refused(seed: int) -> None:
    case = draw(seed, THEIRS)
    outcome = run(case)
    assert outcome.kind in ("equal", "refused", "warned"), f"{json.dumps(case)}: {outcome.what}\n{outcome.details}"
