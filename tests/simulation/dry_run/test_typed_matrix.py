"""Steps of every parallel axis are right by type; each setting of the matrix, and any two together: tests/nightly."""

from __future__ import annotations

import pytest

from tests.helpers.composition import Combination, named
from tests.helpers.typed_runs import PLAIN, typed_step

ROWS: list[Combination] = [
    {"stage": "3", "ranks": "2", "tp": "2 split", "recompute": "blocks"},
    {"stage": "3", "tp": "2 split", "sp": "2", "pp": "2", "precision": "bf16"},
    {"stage": "3", "ranks": "2", "tp": "2 split", "pp": "2", "wire": "yes", "sharing": "module", "spare": "unused"},
    {"stage": "1", "ranks": "2", "tp": "2", "experts": "ep 2 split"},
    {"stage": "2", "ranks": "2", "cp": "2", "sp": "2", "precision": "bf16"},
    {"stage": "1", "ranks": "2", "pp": "2", "schedule": "zb_h1", "tp": "2 split"},
    {"stage": "3", "ranks": "4", "hybrid": "replicas", "experts": "ep 2", "accumulation": "2"},
]


@pytest.mark.parametrize("row", ROWS, ids=map(named, ROWS))
def test_a_step_of_each_parallel_axis_is_right_by_type(row: Combination) -> None:
    report = typed_step({**PLAIN, **row})
    assert [str(each) for each in report.findings] == []
    assert report.num_operators > 500
