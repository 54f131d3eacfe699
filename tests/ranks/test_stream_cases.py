"""What the matrix of streams has no axis for: streams wait for each other where they must; the rest: tests/nightly."""

from __future__ import annotations

import pytest

from tests.stream_cases import CASES
from tests.stream_matrix import reports


@pytest.mark.parametrize("name", CASES)
def test_the_streams_of_small_cases_wait_where_they_must(name: str) -> None:
    found = CASES[name]()
    assert reports(found) == ""
    assert min(check.num_operations for check in found) > 3
