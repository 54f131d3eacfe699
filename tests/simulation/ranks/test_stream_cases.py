"""What the matrix of streams has no axis for: streams wait for each other where they must; the rest: tests/nightly."""

from __future__ import annotations

import pytest

from tests.helpers.stream_cases import CASES, ROWS
from tests.helpers.stream_matrix import reports

# The other rows take as long as all cases: tests/nightly.
TESTED = CASES | {name: run for name, run in ROWS.items() if name == "hpz" or name.startswith("two nodes")}


@pytest.mark.parametrize("name", TESTED)
def test_the_streams_of_small_cases_wait_where_they_must(name: str) -> None:
    found = TESTED[name]()
    assert reports(found) == ""
    assert min(check.num_operations for check in found) > 3
