"""A tier's folder is its own: folders of dead processes are removed, and no other folder is changed."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal import process
from shoal.errors import TierError, UsageError
from shoal.memory.private_folder import PrivateFolder, sweep
from shoal.process import FileOwner

JOB = "0123456789abcdef0123456789abcdef"


def left_behind(parent: Path, **changes: Any) -> Path:
    """What a process of this machine that has ended leaves."""
    path = parent / f"shoal-offload-{JOB}-rank3"
    path.mkdir(mode=0o700)
    this = FileOwner.this(JOB, 3)
    record = {**this.__dict__, "started": (this.started or 0) - 1, "is_locked": True, **changes}
    (path / "owner.json").write_text(json.dumps(record))
    (path / "extent-0000.bin").write_bytes(b"state")
    return path


def test_a_folder_is_private_and_goes_with_its_files(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, rank=2, job=JOB)
    assert folder.path == tmp_path / f"shoal-offload-{JOB}-rank2"
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    os.close(folder.make("extent-0000.bin"))
    assert sorted(os.listdir(folder.path)) == ["extent-0000.bin", "owner.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_owner_file_names_host_process_and_job(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, rank=2, job=JOB)
    record = json.loads((folder.path / "owner.json").read_text())
    assert (record["pid"], record["job"], record["rank"]) == (os.getpid(), JOB, 2)
    assert record["host"] == os.uname().nodename
    assert record["started"] > 0
    folder.remove()


def test_a_file_is_made_once_and_never_through_a_link(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, rank=0)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder.path / "extent-0000.bin").symlink_to(victim)
    with pytest.raises(FileExistsError):
        folder.make("extent-0000.bin")
    with pytest.raises(OSError, match="symbolic links"):
        folder.open("extent-0000.bin", os.O_RDWR)
    with pytest.raises(UsageError, match="not a name that this folder clears away"):
        folder.make("notes.txt")
    folder.remove()
    assert victim.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [victim]


def test_what_a_killed_process_left_is_swept_by_the_next_start(tmp_path: Path) -> None:
    """Row V3: the process is killed for real, while another that lives keeps its own."""
    program = """
import os, signal, sys, torch
from shoal.memory.disk import DiskTier
tier = DiskTier(sys.argv[1], rank=1)
tier.write(tier.allocate("layers.0", 10000), torch.ones(2500)).wait()
print(tier.path, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""

    def start(then: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), then],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, kept = start("live")
    killed, gone = start("die")
    try:
        assert killed.wait(20) == -signal.SIGKILL
        assert sorted(os.listdir(gone)) == ["extent-0000.bin", "owner.json"]
        folder = PrivateFolder(tmp_path, rank=0)
        assert folder.swept == [gone.name]
        assert not gone.exists()
        assert sorted(os.listdir(kept)) == ["extent-0000.bin", "owner.json"]
        folder.remove()
    finally:
        living.communicate("", timeout=20)
        killed.communicate()
    assert living.returncode == 0
    assert list(tmp_path.iterdir()) == []  # a process that ends by itself removes its own


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere"},
        {"machine": "another installation"},
        {"pid": os.getpid(), "started": FileOwner.this(JOB, 3).started},
        {"boot": "another container", "is_locked": False},
        {"rank": 4},
        {"job": "f" * 32},
        {"pid": "1"},
    ],
    ids=["host", "machine", "alive", "container without locks", "another rank", "another job", "nonsense"],
)
def test_a_folder_is_left_where_its_owner_may_live_or_is_another(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = left_behind(tmp_path, **changes)
    assert sweep(tmp_path) == []
    assert sorted(os.listdir(path)) == ["extent-0000.bin", "owner.json"]


@pytest.mark.parametrize("changes", [{}, {"boot": "an earlier start"}, {"pid": 2**22 + 1}])
def test_a_folder_is_swept_where_its_owner_has_certainly_ended(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = left_behind(tmp_path, **changes)
    with caplog.at_level(logging.INFO, logger="shoal"):
        assert sweep(tmp_path) == [path.name]
    assert list(tmp_path.iterdir()) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"removed what 1 process that has ended left in {tmp_path}: {path.name}"
    ]


def test_an_active_lock_has_priority_over_the_file(tmp_path: Path) -> None:
    import fcntl

    path = left_behind(tmp_path, boot="a container whose processes this one cannot see")
    with open(path / "owner.json", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [path.name]


def test_no_start_time_means_that_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "started", lambda pid: None)
    alive = left_behind(tmp_path, pid=os.getpid(), started=None)
    assert sweep(tmp_path) == []
    record = json.loads((alive / "owner.json").read_text())
    (alive / "owner.json").write_text(json.dumps({**record, "pid": 2**22 + 1}))
    assert sweep(tmp_path) == [alive.name]


def test_other_names_links_open_folders_and_folders_without_an_owner_are_left(tmp_path: Path) -> None:
    real = left_behind(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    real.rename(elsewhere)
    (tmp_path / f"shoal-offload-{JOB}-rank3").symlink_to(elsewhere)
    (tmp_path / f"shoal-offload-{JOB}-rank4").mkdir(mode=0o700)
    (tmp_path / f"shoal-offload-{JOB}-rank5").write_text("a file")
    (tmp_path / "shoal-offload-mine-rank0").mkdir()
    opened = left_behind_as(tmp_path, 6)
    opened.chmod(0o755)
    fifo = tmp_path / f"shoal-offload-{JOB}-rank7"
    fifo.mkdir(mode=0o700)
    os.mkfifo(fifo / "owner.json")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert sweep(tmp_path) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def left_behind_as(parent: Path, rank: int) -> Path:
    path = parent / f"shoal-offload-{JOB}-rank{rank}"
    path.mkdir(mode=0o700)
    record = {**FileOwner.this(JOB, rank).__dict__, "started": 0, "is_locked": True}
    (path / "owner.json").write_text(json.dumps(record))
    return path


def test_another_users_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_behind(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert sweep(tmp_path) == []
    assert path.exists()


def test_a_file_of_unknown_origin_in_a_dead_folder_is_kept_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = left_behind(tmp_path)
    (path / "thesis.tex").write_text("not ours")
    with caplog.at_level(logging.INFO, logger="shoal"):
        assert sweep(tmp_path) == []
    assert sorted(os.listdir(path)) == ["owner.json", "thesis.tex"]
    assert "because it contains other files: thesis.tex" in caplog.text
    (path / "thesis.tex").unlink()
    assert sweep(tmp_path) == [path.name]


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    program = """
import os, sys, torch
from shoal.errors import UsageError
from shoal.memory.disk import DiskTier
tier = DiskTier(sys.argv[1], rank=0)
extent = tier.allocate("a", 4096)
child = os.fork()
if not child:
    try:
        tier.write(extent, torch.ones(4))
    except UsageError as error:
        print(error.code, flush=True)
    tier.close()
    sys.exit(0)
os.waitpid(child, 0)
print(sorted(os.listdir(tier.path)), flush=True)
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.splitlines() == ["tier-forked", "['extent-0000.bin', 'owner.json']"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_removed_by_the_process_that_made_it_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(tmp_path, rank=0)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        folder.remove()
    assert os.listdir(folder.path) == ["owner.json"]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_or_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file or directory") as found:
        PrivateFolder(tmp_path / "missing", rank=0)
    assert (found.value.code, found.value.where) == ("tier-folder", str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="Not a directory"):
        PrivateFolder(tmp_path / "file", rank=0)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)  # the superuser, whom tests may run as, is never refused
    with pytest.raises(TierError, match=r"tier-folder.*Permission denied"):
        PrivateFolder(tmp_path, rank=0)


def test_the_same_rank_of_a_job_has_one_folder(tmp_path: Path) -> None:
    first = PrivateFolder(tmp_path, rank=0, job=JOB)
    with pytest.raises(TierError, match="File exists"):
        PrivateFolder(tmp_path, rank=0, job=JOB)
    assert first.path.exists()
    first.remove()


@pytest.mark.parametrize(("job", "rank"), [("short", 0), ("../" + JOB[3:], 0), (JOB, -1)])
def test_a_job_that_is_no_name_is_refused(tmp_path: Path, job: str, rank: int) -> None:
    with pytest.raises(UsageError, match="32 hexadecimal digits"):
        PrivateFolder(tmp_path, rank=rank, job=job)
