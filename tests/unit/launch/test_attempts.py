"""Attempts of an elastic job that fail alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.launch.torchelastic import FollowedFiles, SameFailureError


def hang(rank: int, late: int) -> str:
    return f"shoal: [hang] step 3: rank {rank} hangs; section 'step' of rank {late} took longer than its 4 s\n stacks"


def test_two_hangs_in_one_step_are_alike_if_one_rank_hangs_in_both(tmp_path: Path) -> None:
    watch = SimpleNamespace(step=3)
    files = FollowedFiles(cast(Any, None), cast(Any, watch), tmp_path, 2, rank_0_keeps_terminal=False)
    for rank, late in ((0, 1), (1, 1), (0, 0)):
        files._check_progress(hang(rank, late), {}, "")
    watch.step = 4
    files._check_progress(hang(0, 0), {}, "")
    with pytest.raises(SameFailureError, match="alike, also in step 4"):
        files._check_progress(hang(0, 1), {}, "")
