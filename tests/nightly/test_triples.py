"""Any three settings together train as one process in plain PyTorch does; pairs: tests/ranks/test_composition.py."""

from __future__ import annotations

import pytest

from tests.helpers.composition import Combination, all_pairs, covering, named, triples_of_sums
from tests.helpers.composition_runs import check

TRIPLES = covering(3)
COMPILED = [each for each in all_pairs() if each["compile"] == "yes"]
OF_SUMS = triples_of_sums()  # what failed in use: with accumulation, and nothing else in the way


@pytest.mark.parametrize("combination", TRIPLES, ids=map(named, TRIPLES))
def test_any_three_settings_together_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)


@pytest.mark.parametrize("combination", COMPILED, ids=map(named, COMPILED))
def test_compiled_blocks_with_any_other_setting_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)


@pytest.mark.parametrize("combination", OF_SUMS, ids=map(named, OF_SUMS))
def test_any_three_of_stage_schedule_sums_precision_and_recomputation_end_where_one_process_ends(
    combination: Combination,
) -> None:
    check(combination)
