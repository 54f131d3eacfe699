"""Many random runs over a token stream that change their layout, are killed and resume; a few: tests/ranks/data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.data_layouts import PACKINGS, check, random_legs


@pytest.mark.parametrize("seed", range(100, 160))
def test_random_layouts_kills_and_resumes_change_no_token_and_no_loss(seed: int, tmp_path: Path) -> None:
    check(random_legs(seed, 4, most_ranks=8, most_workers=2), PACKINGS[seed % 4], tmp_path)
