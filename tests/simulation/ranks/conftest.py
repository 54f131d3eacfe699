"""The checks of streams run collectives through the code that GPUs run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.simulated_nccl import nccl_in_simulation


@pytest.fixture(autouse=True)
def nccl() -> Iterator[None]:
    with nccl_in_simulation():
        yield
