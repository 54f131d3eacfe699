"""Attempts of an elastic job that fail alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.launch.failure import read_error
from shoal.launch.torchelastic import FollowedFiles, SameFailureError


def hang(rank: int, late: int) -> str:
    return f"shoal: [hang] step 3: rank {rank} hangs; section 'step' of rank {late} took longer than its 4 s\n stacks"


def test_two_hangs_in_one_step_are_alike_if_one_rank_hangs_in_both(tmp_path: Path) -> None:
    watch = SimpleNamespace(step=3)
    files = FollowedFiles(cast(Any, None), cast(Any, watch), tmp_path, 2, rank_0_keeps_terminal=False)
    for rank, late in ((0, 1), (1, 1), (0, 0)):
        files._check_progress(hang(rank, late), {}, "", None)
    watch.step = 4
    files._check_progress(hang(0, 0), {}, "", None)
    with pytest.raises(SameFailureError, match="alike, also in step 4"):
        files._check_progress(hang(0, 1), {}, "", None)


IMPORT = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nImportError: no module x\n'
USAGE = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr\n"


@pytest.mark.parametrize(("text", "code"), [(IMPORT, 1), (USAGE, 2)])
def test_two_failures_before_initialize_are_alike(text: str, code: int, tmp_path: Path) -> None:
    watch = SimpleNamespace(step=None)
    files = FollowedFiles(cast(Any, None), cast(Any, watch), tmp_path, 2, rank_0_keeps_terminal=False)
    error, other = read_error(text), read_error(IMPORT.replace("module", "file"))
    for _ in range(2):
        files._check_progress("", {0: error}, "rank 0 failed", (0, code))
        files._check_progress("", {0: read_error(USAGE)}, "", (0, -9))
        files._check_progress("", {0: other}, "", (0, 1))
    files._check_progress("", {0: error, 1: other}, "", (0, code))
    with pytest.raises(SameFailureError, match=r"rank 0 failed\nshoal: .* alike, also before initialize"):
        files._check_progress("", {0: error}, "rank 0 failed", (0, code))
