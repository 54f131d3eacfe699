"""Changes of the library that keep values and break an order, or let the host wait, are noticed."""

from __future__ import annotations

import pytest

from tests.helpers.stream_changes import CHANGES, changed


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed(name: str) -> None:
    change = CHANGES[name]
    with changed(change.file, change.old, change.new):
        noticed = change.run()
    assert change.says in noticed


@pytest.mark.parametrize("name", {change.run: name for name, change in CHANGES.items()}.values())
def test_without_the_change_nothing_is_reported(name: str) -> None:
    assert CHANGES[name].run() == ""
