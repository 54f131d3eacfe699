"""A block that threads share is entered by the first and left by the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.shared_block import SharedBlock


def test_it_holds_from_the_first_that_enters_to_the_last_that_leaves_whatever_the_order() -> None:
    happened: list[str] = []

    @contextmanager
    def made() -> Iterator[None]:
        happened.append("entered")
        yield
        happened.append("left")

    block = SharedBlock(made)
    for _ in range(2):
        happened.clear()
        block.__enter__()
        block.__enter__()
        block.__exit__(None, None, None)
        assert happened == ["entered"]
        block.__exit__(None, None, None)
        assert happened == ["entered", "left"]


def test_one_that_cannot_be_entered_is_tried_again_by_the_next() -> None:
    @contextmanager
    def made() -> Iterator[None]:
        raise OSError("not now")
        yield

    block = SharedBlock(made)
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            block.__enter__()
