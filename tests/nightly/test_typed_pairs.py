"""Each setting, and any two together, are right by type."""

from __future__ import annotations

import pytest

from tests.helpers.composition import Combination, covering, named
from tests.helpers.typed_runs import TYPED_AXES, typed_step

ROWS = [*covering(1, TYPED_AXES), *covering(2, TYPED_AXES)]


@pytest.mark.parametrize("combination", ROWS, ids=map(named, ROWS))
def test_any_two_settings_together_are_right_by_type(combination: Combination) -> None:
    assert [str(each) for each in typed_step(combination).findings] == []
