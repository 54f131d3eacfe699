"""Any three settings together train as one process in plain PyTorch does; pairs: tests/ranks/test_composition.py."""

from __future__ import annotations

import pytest

from tests.helpers.composition import WHOLE, Combination, all_pairs, covering, named, settings_of, triples_of_sums
from tests.helpers.composition_runs import check, check_run

TRIPLES = covering(3)
OF_WHOLE = covering(2, WHOLE)
COMPILED = [each for each in all_pairs() if each["compile"] == "yes"]
OF_SUMS = triples_of_sums()  # what failed in use: with accumulation, and nothing else in the way


@pytest.mark.parametrize("combination", TRIPLES, ids=map(named, TRIPLES))
def test_any_three_settings_together_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)


@pytest.mark.parametrize("combination", OF_WHOLE, ids=map(named, OF_WHOLE))
def test_an_optimizer_of_whole_tensors_and_any_two_settings_end_where_one_process_ends(
    combination: Combination,
) -> None:
    check_run(*settings_of(combination, WHOLE))


@pytest.mark.parametrize("combination", COMPILED, ids=map(named, COMPILED))
def test_compiled_blocks_with_any_other_setting_end_where_one_process_ends(combination: Combination) -> None:
    check(combination)


@pytest.mark.parametrize("combination", OF_SUMS, ids=map(named, OF_SUMS))
def test_any_three_of_stage_schedule_sums_precision_and_recomputation_end_where_one_process_ends(
    combination: Combination,
) -> None:
    check(combination)
