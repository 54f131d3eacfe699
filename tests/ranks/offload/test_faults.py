"""Rows V1 to V4 in training: a disk that is missing, full or failing, a host that is too small. Each is injected for
real; all ranks stop with an error that says why, soon, and no file stays."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError, OutOfMemoryError, ShoalError, TierError, UsageError
from tests.ranks.offload.test_offload import MODEL, config, make_apart

PLACES = [("offload_param",), ("offload_optimizer",), ("offload_param", "offload_optimizer")]


def on_disk(folder: Path, places: tuple[str, ...]) -> dict[str, Any]:
    found = config(3, "bf16", "AdamW", (), 1)
    for place in places:
        found["zero_optimization"][place] = {"device": "nvme", "nvme_path": str(folder)}
        if place == "offload_param":
            found["zero_optimization"][place]["max_in_cpu"] = 0
    return found


def one_step(engine: shoal.Engine) -> None:
    tokens = torch.arange(10).view(2, 5)
    engine.backward(engine(tokens).float().square().mean())
    engine.step()


def outcomes(folder: Path, settings: dict[str, Any], act: Callable[[shoal.Engine], None], size: int = 2) -> list[str]:
    """What each rank ends with; each destroys its engine. No file stays, and nobody waits for long."""
    found: dict[int, str] = {}

    def job() -> None:
        engine = None
        try:
            engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
            act(engine)
        except ShoalError as error:
            found[current_world().rank] = error.code
            raise
        finally:
            if engine is not None:
                try:
                    engine.destroy()
                except CommError:
                    assert found[current_world().rank] == "rank-failed"

    begin = time.monotonic()
    with pytest.raises(ShoalError):
        run_ranks(size, job)
    assert time.monotonic() - begin < 40  # nobody waits for the timeout, of 60
    assert [path for path in folder.iterdir() if path.name != "filler"] == []
    return [found[rank] for rank in range(size)]


# V1, V2: what is on the disk is no longer what was written


@pytest.mark.parametrize("places", PLACES)
def test_a_bit_that_turns_on_the_disk_stops_all_ranks_where_the_config_keeps_sums(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    def act(engine: shoal.Engine) -> None:
        one_step(engine)
        one_step(engine)
        rank = current_world().rank
        if rank == 1:
            files = [path for path in tmp_path.rglob("extent-*.bin") if path.parent.name.endswith(f"rank{rank}")]
            assert files
            for path in files:
                with open(path, "r+b") as file:
                    first = file.read(1)[0]
                    file.seek(0)
                    file.write(bytes([first ^ 4]))
        for _ in range(3):
            one_step(engine)

    settings = {**on_disk(tmp_path, places), "debug": {"disk_sums": True}}
    assert outcomes(tmp_path, settings, act) == ["rank-failed", "tier-damaged"]


@pytest.mark.parametrize("places", PLACES)
def test_sums_change_no_bit(places: tuple[str, ...], tmp_path: Path) -> None:
    def job(has_sums: bool) -> list[torch.Tensor]:
        settings = {**on_disk(tmp_path, places), "debug": {"disk_sums": has_sums}}
        engine, *_ = shoal.initialize(model=copy.deepcopy(MODEL), config=settings)
        for _ in range(3):
            one_step(engine)
        model = engine.module
        engine.destroy()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for plain, summed in zip(run_ranks(2, job, False), run_ranks(2, job, True), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, summed, strict=True))


# V2: before the run


@pytest.mark.parametrize("places", PLACES)
def test_a_folder_that_is_missing_or_cannot_be_written_is_an_error_on_all_ranks(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    def job() -> str:
        with pytest.raises(TierError, match="none") as caught:
            shoal.initialize(model=copy.deepcopy(MODEL), config=on_disk(tmp_path / "none", places))
        return caught.value.code

    codes = run_ranks(2, job)
    assert codes[0] == codes[1]


@pytest.mark.parametrize("places", PLACES)
def test_a_folder_that_only_one_rank_cannot_use_is_an_error_on_all_ranks(
    places: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith("rank1"):
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)

    def job() -> tuple[str, str]:
        with pytest.raises(TierError, match="Read-only file system") as caught:
            shoal.initialize(model=copy.deepcopy(MODEL), config=on_disk(tmp_path, places))
        return caught.value.code, caught.value.where

    found = run_ranks(2, job)
    assert found[0] == found[1]
    assert found[0][1].startswith("rank 1: ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, but_nbytes: int = 0) -> None:
    free = os.statvfs(place)
    with open(place / "filler", "wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - but_nbytes)))


@pytest.mark.parametrize("places", PLACES)
def test_a_disk_that_is_too_full_is_an_error_before_anything_is_written(
    places: tuple[str, ...], small_disk: Path
) -> None:
    fill(small_disk, 16384)
    assert outcomes(small_disk, on_disk(small_disk, places), lambda engine: None) in (
        ["tier-no-room", "tier-no-room"],
        ["tier-no-room", "rank-failed"],
        ["rank-failed", "tier-no-room"],
    )


# V1, V2: while running


def test_a_disk_that_fills_up_while_running_stops_all_ranks(small_disk: Path) -> None:
    def act(engine: shoal.Engine) -> None:
        barrier.wait(10)
        if current_world().rank == 0:
            fill(small_disk)
        barrier.wait(10)
        one_step(engine)  # allocates the optimizer's state, for which there is no space

    barrier = threading.Barrier(2)
    codes = outcomes(small_disk, on_disk(small_disk, ("offload_optimizer",)), act)
    assert "tier-no-room" in codes
    assert set(codes) <= {"tier-no-room", "rank-failed"}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("fault", ["eio", "short", "truncated"])
def test_a_read_that_fails_or_comes_short_stops_all_ranks(
    places: tuple[str, ...], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if is_faulty.is_set() and "rank1" in os.readlink(f"/proc/self/fd/{fd}"):
            if fault == "eio":
                raise OSError(errno.EIO, "Input/output error")
            if fault == "short":
                return 0
        return real(fd, buffers, offset)

    def act(engine: shoal.Engine) -> None:
        one_step(engine)
        barrier.wait(10)
        if current_world().rank == 1:
            disks = engine.sharded.disks
            if disks.parameters is not None:
                disks.parameters.synchronize()
            if disks.state is not None:
                disks.state._store.synchronize()
            is_faulty.set()
            if fault == "truncated":
                for path in tmp_path.glob("*rank1/extent-*"):
                    os.truncate(path, 0)
        barrier.wait(10)
        try:
            one_step(engine)
            one_step(engine)  # at the latest here the other rank waits for the first
        except TierError as error:
            wheres.append(error.where)
            with pytest.raises(UsageError, match="failed before"):  # nothing is saved from it
                engine.save_checkpoint(str(tmp_path / "c"))
            raise

    monkeypatch.setattr(os, "preadv", read)
    is_faulty, barrier, wheres = threading.Event(), threading.Barrier(2), list[str]()
    codes = outcomes(tmp_path, on_disk(tmp_path, places), act)
    assert all(str(tmp_path) in where and "at offset" in where for where in wheres)
    assert wheres
    assert codes[1] in ("tier-io", "tier-truncated")
    assert codes[0] in ("rank-failed", codes[1])


@pytest.mark.parametrize("places", PLACES)
def test_a_write_that_fails_stops_all_ranks(
    places: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if is_faulty.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    def act(engine: shoal.Engine) -> None:
        one_step(engine)
        barrier.wait(10)
        is_faulty.set()
        one_step(engine)
        one_step(engine)  # what was not written cannot be read

    monkeypatch.setattr(os, "pwritev", write)
    is_faulty, barrier = threading.Event(), threading.Barrier(2)
    codes = outcomes(tmp_path, on_disk(tmp_path, places), act)
    assert "tier-no-room" in codes
    assert set(codes) <= {"tier-no-room", "rank-failed"}


# V3: a crash


SCRIPT = """
import os, signal, sys
import torch
import shoal
from tests.ranks.offload.test_faults import on_disk, one_step, MODEL
from pathlib import Path

engine, *_ = shoal.initialize(model=MODEL, config=on_disk(Path(sys.argv[1]), ("offload_param", "offload_optimizer")))
one_step(engine)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "raised":
    raise RuntimeError("of the user's own")
"""


def run(folder: Path, end: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), end], capture_output=True, timeout=100, check=False
    )
    return done.returncode


@pytest.mark.timeout(120)  # it starts three processes, one after another
def test_files_go_with_the_process_and_after_a_kill_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "of-another").mkdir()
    (tmp_path / "of-another" / "extent-0000.bin").write_bytes(b"mine")
    assert run(tmp_path, "raised") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["of-another"]
    assert run(tmp_path, "killed") == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 1
    assert run(tmp_path, "ended") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["of-another"]
    assert (tmp_path / "of-another" / "extent-0000.bin").read_bytes() == b"mine"


# V4: a host that is too small


def test_too_little_host_memory_is_refused_with_what_is_needed_and_available(monkeypatch: pytest.MonkeyPatch) -> None:
    make_apart(monkeypatch)
    monkeypatch.setattr("shoal.engine.offload.host_available_nbytes", lambda: 2_000)

    def job() -> str:
        with pytest.raises(OutOfMemoryError, match=r"are needed.*are available") as caught:
            shoal.initialize(model=copy.deepcopy(MODEL), config=config(3, "bf16", "AdamW", ("optimizer", "param"), 1))
        return caught.value.code

    assert run_ranks(2, job) == ["host-too-small"] * 2
