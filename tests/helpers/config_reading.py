"""Reads a configuration: its problems as a dict, or the whole without a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from shoal.config import Config, ConfigProblems, ConfigWarning, load


def problems(source: object, **options: Any) -> dict[str, str]:
    """Path -> what and do, of each problem."""
    with pytest.raises(ConfigProblems) as caught:
        load(source, **options)
    return {problem.path: f"{problem.what} {problem.do}".strip() for problem in caught.value.problems}


def quietly(source: object, **options: Any) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load(source, **options)
