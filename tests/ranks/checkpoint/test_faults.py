"""A process that is killed at any moment of a save leaves the old checkpoint or the new one, whole to the bit."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.checkpoint import directory, lock
from shoal.checkpoint.storage import LocalStorage
from shoal.comm.threads import run_ranks
from tests.helpers.any_two import ALL_ROWS
from tests.helpers.dying import (
    BETWEEN_RENAMES,
    EVERY_RANKS_PHASES,
    FAILED,
    FIRST_RANKS_PHASES,
    SIZE,
    Nursery,
    save_and_die,
    tiny,
)
from tests.helpers.resuming import State, differences, engine_of, micro_steps, state_of

KILLED = -signal.SIGKILL
QUICK_SECONDS = lock.STILL_SECONDS / 2  # less than a lock is watched for whose owner cannot be asked


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery()


@dataclass
class Oracle:
    """A run that nothing happened to: its state after each step, and its first checkpoint, saved under two tags."""

    states: dict[int, list[State]]
    folder: Path

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.folder, to)
        return to


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("oracle") / "run"
    run = tiny()

    def rank() -> list[State]:
        engine = engine_of(run)
        states = []
        for step in range(4):
            losses = micro_steps(engine, run, step, 1)
            states.append(state_of(engine, losses))
            if step == 0:
                engine.save_checkpoint(folder, tag="best", save_latest=False)
                engine.save_checkpoint(folder)
        engine.destroy()
        return states

    ranks = run_ranks(SIZE, rank)
    return Oracle({step + 1: [states[step] for states in ranks] for step in range(4)}, folder)


def go_on(oracle: Oracle, folder: Path, tag: str | None = None) -> int:
    """A fresh pair loads, is where the oracle was, trains a step as it did, saves. Returns: the step that it found."""
    run = tiny()

    def rank() -> tuple[int, State, State, float]:
        engine = engine_of(run)
        try:
            engine.load_checkpoint(folder, tag=tag)
            loaded = state_of(engine)
            later = state_of(engine, micro_steps(engine, run, engine.global_steps, 1))
            began = time.monotonic()
            engine.save_checkpoint(folder, tag=tag)
            return engine.global_steps - 1, loaded, later, time.monotonic() - began
        finally:
            engine.destroy()

    ranks = run_ranks(SIZE, rank)
    step = ranks[0][0]
    assert differences(oracle.states[step], [loaded for _, loaded, _, _ in ranks]) == []
    later = [later for _, _, later, _ in ranks]
    assert differences(oracle.states[step + 1], later) == []
    assert [s.losses for s in later] == [s.losses for s in oracle.states[step + 1]]
    assert [s.counters for s in later] == [s.counters for s in oracle.states[step + 1]]
    assert max(seconds for *_, seconds in ranks) < QUICK_SECONDS
    return step


def matrix() -> Iterator[tuple[str, int, bool]]:
    """Any two of phase, victim and kind of save together; ``make test-nightly``: any three."""
    for number, phase in enumerate((*EVERY_RANKS_PHASES, *FIRST_RANKS_PHASES)):
        for victim in range(SIZE):
            kinds = (False, True) if ALL_ROWS else ((number + victim) % 2 == 0,)
            for is_async in kinds if number else (True,):  # only an asynchronous save makes a snapshot
                yield phase, victim, is_async


@pytest.mark.parametrize(
    ("phase", "victim", "is_async"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}-{'a' * row[2]}sync") for row in matrix()],
)
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint_or_the_new_one(
    nursery: Nursery, oracle: Oracle, tmp_path: Path, phase: str, victim: int, is_async: bool
) -> None:
    folder = oracle.copy(tmp_path / "run")
    codes = nursery.run(save_and_die, tmp_path / "out", str(folder), is_async, victim, phase, None, 1)
    assert codes[victim] == KILLED
    assert codes[1 - victim] == FAILED
    assert "RankFailedError" in (tmp_path / "out" / f"rank-{1 - victim}").read_text()
    # Rank 0 commits what all have written, whoever dies meanwhile.
    is_committed = phase in ("latest", "gc") or (victim == 1 and phase in FIRST_RANKS_PHASES)
    assert (folder / "global_step2").exists() == is_committed
    assert (folder / lock.NAME).exists() == (victim == 0)
    assert bool(list(folder.glob("*.tmp-*"))) == (victim == 0 and not is_committed)
    assert (folder / "latest").read_text() == f"global_step{2 if is_committed and phase != 'latest' else 1}" or (
        victim == 1 and is_committed
    )
    assert go_on(oracle, folder) == (2 if is_committed else 1)
    steps = [1, 2, 3] if is_committed else [1, 2]
    assert sorted(os.listdir(folder)) == ["best", *(f"global_step{step}" for step in steps), "latest"]
    assert (folder / "latest").read_text() == f"global_step{steps[-1]}"


@pytest.mark.parametrize("phase", ["shard_fsync", "manifest", "rename", BETWEEN_RENAMES, "latest", "gc"])
def test_a_rank_killed_while_it_replaces_a_checkpoint_leaves_a_whole_one_of_that_tag(
    nursery: Nursery, oracle: Oracle, tmp_path: Path, phase: str
) -> None:
    folder = oracle.copy(tmp_path / "run")
    shutil.rmtree(folder / "global_step1")
    before = {path.name: path.read_bytes() for path in (folder / "best").iterdir()}
    codes = nursery.run(save_and_die, tmp_path / "out", str(folder), False, 0, phase, "best", 1)
    assert codes == [KILLED, FAILED]
    is_new = phase in ("latest", "gc")
    places = [path.parent for path in folder.glob("best*/manifest.json") if ".tmp-" not in path.parent.name]
    olds = [place for place in places if {p.name: p.read_bytes() for p in place.iterdir()} == before]
    assert len(olds) == 1, "the old one was written to"
    assert len(places) == 1 + is_new
    assert directory.find_tag(LocalStorage(folder), "best") == ("best" if phase != BETWEEN_RENAMES else olds[0].name)
    assert go_on(oracle, folder, tag="best") == (2 if is_new else 1)
    go_on(oracle, folder, tag="best")  # what this save replaces is swept by it, what the killed one left by that
    assert sorted(os.listdir(folder)) == ["best", "latest"]
