"""Disks that are full, read-only or broken: training goes on, and what was saved stays."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.storage import LocalStorage
from shoal.comm.threads import run_ranks
from tests.helpers.dying import SIZE, tiny
from tests.helpers.failing_saves import Outcome, attempt, load, save_and_finish, steps_in
from tests.helpers.resuming import Run, State, differences, engine_of, micro_steps, state_of

DISK_NBYTES = 2 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no free space."""
    with open(place / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with pytest.raises(OSError, match="No space left on device"):  # noqa: PT012
                while True:
                    file.write(bytes(size))


def train_through(run: Run, folder: Path, on_phase: Callable[[str], None], then: Callable[[], None]) -> list[Any]:
    """Step, save; step, save with a fault; ``then``; step, save, on two ranks.

    Returns: of each rank, what the second and third save said, and its state after all.
    """

    def rank() -> tuple[Outcome, State]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        outcomes = [attempt(lambda: engine.save_checkpoint(folder))]
        micro_steps(engine, run, 1, 1)
        engine.checkpointing.on_phase = on_phase
        outcomes.append(attempt(lambda: save_and_finish(engine, folder)))
        engine.axes.world.barrier(label="test: all have failed")
        if engine.global_rank == 0:
            then()
        engine.axes.world.barrier(label="test: mended")
        engine.checkpointing.on_phase = lambda phase: None
        micro_steps(engine, run, 2, 1)
        outcomes.append(attempt(lambda: save_and_finish(engine, folder)))
        state = state_of(engine)
        engine.destroy()
        return outcomes, state

    return run_ranks(SIZE, rank)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[State]]:
    """The states after one, two and three steps of a run that saves nothing."""
    run = tiny()

    def rank() -> list[State]:
        engine = engine_of(run)
        states = []
        for step in range(3):
            micro_steps(engine, run, step, 1)
            states.append(state_of(engine))
        engine.destroy()
        return states

    ranks = run_ranks(SIZE, rank)
    return {step + 1: [states[step] for states in ranks] for step in range(3)}


# a full disk


FULL_AT = {  # phase: is the checkpoint there all the same
    "begin": False,
    "snapshot": False,
    "shard_write": False,
    "shard_fsync": False,
    "exchange": False,
    "manifest": False,
    "rename": True,  # needs no space; the next operations do
    "latest": True,
    "gc": True,
}


@pytest.mark.parametrize(
    ("phase", "is_async"),
    [(phase, is_async) for phase in FULL_AT for is_async in (False, True) if is_async or phase != "snapshot"],
)
def test_a_disk_that_is_full_at_any_phase_costs_one_checkpoint_and_no_step(
    disk: Path,
    undisturbed: dict[int, list[State]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    is_async: bool,
) -> None:
    folder = disk / "run"
    run = tiny(checkpoint={"async_save": is_async}, log_level="warning")
    is_rank_0s = {"manifest", "rename", "latest", "gc"}
    in_between: list[list[str]] = []

    def fill_at(name: str) -> None:
        if name == phase:
            fill(disk)

    is_mended: list[bool] = []
    make_folder = LocalStorage.make_folder

    def full_before(self: LocalStorage, path: str) -> None:
        if phase == "begin" and self.exists("global_step1") and not is_mended:
            fill(disk)
        make_folder(self, path)

    def mend() -> None:
        in_between.append(steps_in(folder))
        is_mended.append(True)
        (disk / "filler").unlink()

    monkeypatch.setattr(LocalStorage, "make_folder", full_before)
    ranks = train_through(run, folder, fill_at, mend)
    states = [state for _, state in ranks]
    assert differences(undisturbed[3], states) == []
    is_there = FULL_AT[phase]
    for outcomes, _ in ranks:
        code, said = outcomes[1]
        assert outcomes[0] == outcomes[2] == ("returned", True)
        if is_there:
            assert (code, said) == ("returned", True)
        else:
            assert code in ("checkpoint-write", "checkpoint-space")
            assert "No space left on device" in said or "are free" in said
    assert in_between == [["global_step1", "global_step2"] if is_there else ["global_step1"]]
    warnings = [r for r in caplog.records if "is saved, but 'latest' does not name it" in r.getMessage()]
    assert len(warnings) == (SIZE if phase in ("rename", "latest") else 0)
    assert steps_in(folder) == ["global_step1", *(["global_step2"] if is_there else []), "global_step3"]
    assert phase in is_rank_0s or not is_there
    assert differences(undisturbed[1], load(run, folder, tag="global_step1")) == []
    assert differences(undisturbed[3], load(run, folder)) == []


def test_too_little_space_is_said_before_anything_is_written(disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(DISK_NBYTES - (64 << 10)))
    run = tiny()

    def rank() -> tuple[str, Any]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        said = attempt(lambda: engine.save_checkpoint(disk / "run"))
        engine.destroy()
        return said

    for code, text in run_ranks(SIZE, rank):
        assert code == "checkpoint-space"
        assert "free" in text
    assert os.listdir(disk / "run") == []


# a disk that cannot be written


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how},size={DISK_NBYTES}", str(place)], check=True, capture_output=True)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_read_only_disk_costs_one_checkpoint_and_no_step(
    disk: Path, undisturbed: dict[int, list[State]], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny(checkpoint={"on_save_error": policy})
    folder = disk / "run"

    def rank() -> tuple[Outcome, State]:
        engine = engine_of(run)
        micro_steps(engine, run, 0, 1)
        outcomes = [attempt(lambda: engine.save_checkpoint(folder))]
        for how in ("ro", "rw"):
            if engine.global_rank == 0:
                remount(disk, how)
            engine.axes.world.barrier(label="test: remounted")
            micro_steps(engine, run, engine.global_steps, 1)
            outcomes.append(attempt(lambda: engine.save_checkpoint(folder)))
        state = state_of(engine)
        engine.destroy()
        return outcomes, state

    ranks = run_ranks(SIZE, rank)
    assert differences(undisturbed[3], [state for _, state in ranks]) == []
    for outcomes, _ in ranks:
        code, said = outcomes[1]
        if policy == "warn":
            assert (code, said) == ("returned", False)
        else:
            assert code == "checkpoint-write"
            assert "Read-only file system" in said
        assert outcomes[2] == ("returned", True)
    told = [r for r in caplog.records if r.levelno == logging.ERROR and "Read-only file system" in r.getMessage()]
    assert len(told) == (SIZE if policy == "warn" else 0)
    assert steps_in(folder) == ["global_step1", "global_step3"]
    assert differences(undisturbed[3], load(run, folder)) == []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_broken_disk_of_one_rank_is_an_error_on_all_ranks(
    tmp_path: Path,
    undisturbed: dict[int, list[State]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    victim: int,
    is_async: bool,
) -> None:
    real = getattr(os, call)
    is_broken = threading.Event()

    def broken(fd: int, *args: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if is_broken.is_set() and path.endswith(f"rank-0000{victim}.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(fd, *args)

    monkeypatch.setattr(os, call, broken)
    run = tiny(checkpoint={"async_save": is_async})
    folder = tmp_path / "run"
    ranks = train_through(run, folder, lambda phase: is_broken.set(), is_broken.clear)
    assert differences(undisturbed[3], [state for _, state in ranks]) == []
    for outcomes, _ in ranks:
        code, said = outcomes[1]
        assert code == "checkpoint-write"
        assert "Input/output error" in said
        assert f"rank-0000{victim}.safetensors" in said
        assert f"where: rank {victim}" in said
    assert steps_in(folder) == ["global_step1", "global_step3"]
