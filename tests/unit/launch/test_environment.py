"""The variables of threads and devices."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.launch.environment import read_environment


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", ()), ("0,1", ("0", "1")), ("3", ("3",)), ("GPU-8a1b,", ("GPU-8a1b",))],
)
def test_visible_devices_keep_their_names(value: str | None, expected: tuple[str, ...] | None) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert read_environment(variables).visible_devices == expected


@pytest.mark.parametrize(("value", "expected"), [("", None), ("4", 4), ("4,2", 4)])
def test_the_number_of_threads_is_that_of_the_first_nested_level(value: str, expected: int | None) -> None:
    assert read_environment({"OMP_NUM_THREADS": value}).num_threads == expected


def test_a_number_of_threads_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="OMP_NUM_THREADS='many'"):
        read_environment({"OMP_NUM_THREADS": "many"})
