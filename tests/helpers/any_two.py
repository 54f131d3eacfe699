"""A test of few rows in place of a whole product: any two values of different parameters occur together in a row.

``make test-nightly`` runs every row of the product: it sets ``SHOAL_TESTS_ALL_ROWS=1``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

ALL_ROWS = os.environ.get("SHOAL_TESTS_ALL_ROWS") == "1"


def covering_rows(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices, one below each of ``sizes``, in which any two indices of different places occur together.

    Of all rows the one that covers the most pairs that are not covered yet is the next; of equals, the first.
    """
    rows = list(itertools.product(*map(range, sizes)))
    missing = {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}
    result = []
    while missing:
        row = max(rows, key=lambda row: sum(pair in missing for pair in itertools.combinations(enumerate(row), 2)))
        missing -= set(itertools.combinations(enumerate(row), 2))
        result.append(row)
    return result


def any_two(values: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Like a ``parametrize`` for each name, of three names or more, with few of the rows.

    Args:
        values: by name. "stage, places" are two parameters whose values, pairs, are always together.
    """
    names = [name for joined in values for name in joined.split(", ")]
    columns = [[value if ", " in joined else (value,) for value in column] for joined, column in values.items()]
    indices = itertools.product(*(range(len(c)) for c in columns)) if ALL_ROWS else covering_rows([*map(len, columns)])
    rows = [
        tuple(itertools.chain.from_iterable(column[index] for column, index in zip(columns, row, strict=True)))
        for row in indices
    ]
    return pytest.mark.parametrize(names, rows)


def in_turn(values: Sequence[Any], rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each row with one of ``values`` before it, in turn; all of them with each, where every row of products runs."""
    if ALL_ROWS:
        return [(value, *row) for row in rows for value in values]
    return [(value, *row) for value, row in zip(itertools.cycle(values), rows, strict=False)]
