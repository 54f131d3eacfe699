"""Any three settings together: streams wait where they must; pairs: tests/simulation/ranks/test_stream_matrix.py."""

from __future__ import annotations

import pytest

from tests.helpers.composition import Combination, covering
from tests.helpers.simulated_nccl import nccl_in_simulation
from tests.helpers.stream_matrix import STREAM_AXES, checks_of, named, reports

TRIPLES = covering(3, STREAM_AXES)


@pytest.mark.parametrize("combination", TRIPLES, ids=map(named, TRIPLES))
def test_the_streams_of_any_three_settings_wait_where_they_must(combination: Combination) -> None:
    with nccl_in_simulation():
        assert reports(checks_of(combination)) == ""
