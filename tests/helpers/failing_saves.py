"""What saves and loads said, where some of them are to fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import CheckpointError
from tests.helpers.dying import SIZE
from tests.helpers.resuming import Run, State, engine_of, state_of

Outcome = list[tuple[str, Any]]  # of one rank: what each save said


def attempt(act: Callable[[], Any]) -> tuple[str, Any]:
    """``("returned", value)``, or the error's code and text."""
    try:
        return "returned", act()
    except CheckpointError as error:
        return error.code, str(error)


def save_and_finish(engine: shoal.Engine, folder: Path) -> bool:
    is_saved = engine.save_checkpoint(folder)
    engine.checkpointing.finish()
    return is_saved


def load(run: Run, folder: Path, **options: Any) -> list[State]:
    def rank() -> State:
        engine = engine_of(run)
        engine.load_checkpoint(folder, **options)
        state = state_of(engine)
        engine.destroy()
        return state

    return run_ranks(SIZE, rank)


def steps_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "latest")
