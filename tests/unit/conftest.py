"""What the unit tests share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.deepspeed_made import MADE


@pytest.fixture
def deepspeed_copy(tmp_path: Path) -> Any:
    """``deepspeed_copy(case)``: a checkpoint to damage; gives its tag's folder."""

    def make(case: str) -> Path:
        shutil.copytree(MADE / case / "checkpoint", tmp_path / "checkpoint")
        return tmp_path / "checkpoint" / "global_step3"

    return make
