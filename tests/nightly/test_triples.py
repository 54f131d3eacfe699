"""Any three settings together train as one process in plain PyTorch does; pairs: tests/ranks/test_composition.py."""

from __future__ import annotations

import pytest

from tests.helpers.composition import Combination, covering, named
from tests.helpers.composition_runs import check

TRIPLES = covering(3)


@pytest.mark.parametrize("combination", TRIPLES, ids=map(named, TRIPLES))
def test_any_three_settings_together_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)
