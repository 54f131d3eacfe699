"""The tests of this folder start jobs of several processes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_all_cores(all_cores: None) -> None:
    return
