"""What all tests of clients have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SECONDS = 600  # a script that starts ranks ends itself before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.clients)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS))
