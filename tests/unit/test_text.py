"""Plain text for people: near names, sizes, counts, tables."""

from __future__ import annotations

import doctest

import pytest

import shoal.text
from shoal.text import did_you_mean, format_bytes, format_count, nearest, table


def test_the_examples_in_the_docstrings_hold() -> None:
    outcome = doctest.testmod(shoal.text)
    assert outcome.attempted == 11
    assert outcome.failed == 0


def test_nearest_ignores_case_and_space_around() -> None:
    assert nearest(" ADAMw ", ["AdamW", "Lion"]) == ["AdamW"]


def test_nearest_finds_nothing_far_away() -> None:
    assert nearest("quux", ["gradient_clipping"]) == []
    assert did_you_mean("quux", ["gradient_clipping"]) == ""


def test_did_you_mean_names_the_candidates() -> None:
    assert did_you_mean("stge", ["stages", "stage", "aio"]) == "; did you mean 'stage' or 'stages'?"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1_048_575, "1 MiB"), (5 * 1024**4, "5 TiB"), (-1536, "-1.5 KiB")],
)
def test_bytes_are_shown_in_powers_of_1024(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1_000, "1 k"), (999_999, "1 M"), (7_000_000_000, "7 B"), (2e12, "2 T")]
)
def test_counts_are_shown_in_powers_of_1000(count: float, text: str) -> None:
    assert format_count(count) == text


def test_a_table_without_rows_has_its_headers() -> None:
    assert table([], ["unit", "bytes"]) == "unit  bytes\n----  -----"


def test_columns_of_numbers_are_right_aligned() -> None:
    assert table([["a", "1,024"], ["b", 3]], ["n", "bytes"]) == "n  bytes\n-  -----\na  1,024\nb      3"
