"""What is flushed when, what a loss of power leaves, and reads and writes that stop short."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import directory
from shoal.checkpoint.commit import Retention, discard, prunable
from shoal.checkpoint.storage import LocalStorage, open_storage
from shoal.errors import CheckpointError
from shoal.memory.host import PAGE, aligned_empty
from tests.helpers.checkpoint_maker import make, newest, read, rewrite, values

Event = tuple[str, str]  # what, and the path under the root; "->" between the two of a rename


class Disk:
    """Watches flushes and renames under a folder, and says what a loss of power would leave of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.events: list[Event] = []
        self.flushed: set[int] = set()  # inodes of files whose bytes are on the disk
        self.on_event: Callable[[], None] = lambda: None
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def watched_fsync(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._note("fsync", path)
            fsync(fd)
            self.flushed.add(os.fstat(fd).st_ino)
            self.on_event()

        def watched_rename(source: Any, target: Any, move: Callable[..., None] = rename) -> None:
            self.on_event()
            self._note("rename", source, target)
            move(source, target)
            self.on_event()

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(os, "rename", watched_rename)
        monkeypatch.setattr(os, "replace", lambda source, target: watched_rename(source, target, replace))

    def _note(self, what: str, *paths: Any) -> None:
        relative = [os.path.relpath(path, self.root) for path in paths]
        self.events.append((what, " -> ".join(_without_token(path) for path in relative)))

    def after_a_loss_of_power(self, to: Path) -> LocalStorage:
        """A copy of the folder in which the bytes that were not flushed are gone, and their files empty."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.root, to)
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self.flushed:
                os.truncate(to / path.relative_to(self.root), 0)
        return LocalStorage(to)


def _without_token(path: str) -> str:
    parts = [part.partition(".tmp-")[0] + ".tmp" if ".tmp-" in part else part for part in path.split("/")]
    return "/".join(part.partition(".old-")[0] + ".old" if ".old-" in part else part for part in parts)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_files_are_flushed_before_their_folder_that_before_the_rename_and_its_parent_last(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    disk = Disk(root, monkeypatch)
    make(LocalStorage(root), 1)
    assert disk.events == [
        ("fsync", "step1.tmp/rank-00000.safetensors"),
        ("fsync", "step1.tmp/rank-00001.safetensors"),
        ("fsync", "step1.tmp/manifest.json"),
        ("fsync", "step1.tmp"),
        ("rename", "step1.tmp -> step1"),
        ("fsync", "."),
        ("fsync", "latest.tmp"),
        ("rename", "latest.tmp -> latest"),
        ("fsync", "."),
    ]


def test_a_new_root_survives_a_loss_of_power_before_anything_is_written_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    make(LocalStorage(tmp_path / "a" / "b"), 1)
    assert disk.events[:2] == [("fsync", "a"), ("fsync", ".")]


def test_a_loss_of_power_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(root, monkeypatch)
    make(LocalStorage(root), 1)
    seen: list[int] = []

    def lose_power() -> None:
        found = newest(disk.after_a_loss_of_power(tmp_path / "after"))
        seen.append(1 if torch.equal(found, values(1)) else 2)
        assert torch.equal(found, values(seen[-1]))

    disk.on_event = lose_power
    make(LocalStorage(root), 2)
    disk.on_event = lambda: None
    # 4 flushes and the moment before the rename; after it all is flushed that it names.
    assert seen == [1] * 5 + [2] * 6


def test_a_loss_of_power_while_a_tag_is_replaced_leaves_a_whole_one_of_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(root, monkeypatch)
    make(LocalStorage(root), 1, "best")
    seen: list[int] = []

    def lose_power() -> None:
        after = disk.after_a_loss_of_power(tmp_path / "after")
        found = read(after, directory.find_tag(after, "best"))
        seen.append(1 if torch.equal(found, values(1)) else 2)
        assert torch.equal(found, values(seen[-1]))

    disk.on_event = lose_power
    make(LocalStorage(root), 2, "best")
    disk.on_event = lambda: None
    assert seen == [1] * 7 + [2] * 6
    assert sorted(os.listdir(root)) == ["best", "latest"]


def test_files_that_were_never_flushed_are_not_taken_for_a_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above could not fail if a load took empty files."""
    disk = Disk(root, monkeypatch)
    make(LocalStorage(root), 1)
    kept = set(disk.flushed)
    make(LocalStorage(root), 2)
    disk.flushed = kept
    after = disk.after_a_loss_of_power(tmp_path / "after")
    assert torch.equal(newest(after), values(1))
    with pytest.raises(CheckpointError, match="manifest cannot be read"):
        directory.inspect(after, "step2")


def killed_in(monkeypatch: pytest.MonkeyPatch, name: str, when: Callable[..., bool]) -> None:
    """Let ``os.NAME`` fail where ``when`` says, as if the process had died there."""
    real = getattr(os, name)

    def die(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise SystemExit("killed")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, die)


def test_a_hint_that_was_never_renamed_is_swept_by_the_next_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(root)
    make(storage, 1)
    (root / "latest.tmp-4711").write_text("step2")
    make(storage, 2)
    assert sorted(os.listdir(root)) == ["latest", "step1", "step2"]


def test_a_sweep_takes_nothing_that_no_save_has_left(root: Path) -> None:
    storage = LocalStorage(root)
    make(storage, 1)
    ours = root / "step9.tmp-0123456789ab"
    ours.mkdir()
    (ours / "rank-00000.safetensors").write_bytes(b"half")
    theirs = {
        "step9.tmp-ba9876543210/notes.txt": "of the user",
        "step9.tmp-not-a-token/rank-00000.safetensors": "not our name",
        "model.old-0123456789ab/rank-00000.safetensors": "of no checkpoint that is there",
        "plain.tmp-0123456789ab": "a file",
    }
    for name, text in theirs.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    make(storage, 2)
    assert not ours.exists()
    assert {name: (root / name).read_text() for name in theirs} == theirs


def test_what_was_replaced_stays_while_its_successor_is_damaged(root: Path) -> None:
    storage = LocalStorage(root)
    make(storage, 1, "best")
    (root / "best").rename(root / "best.old-0123456789ab")
    make(storage, 2, "best")
    assert "best.old-0123456789ab" in os.listdir(root)  # swept only by the next
    os.truncate(root / "best" / "rank-00001.safetensors", 10)
    make(storage, 3)
    assert torch.equal(read(storage, "best.old-0123456789ab"), values(1))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_save_never_replaces_what_is_no_checkpoint(root: Path, kind: str) -> None:
    root.mkdir()
    if kind == "file":
        (root / "logs").write_text("of the user")
    else:
        (root / "logs").mkdir()
        (root / "logs" / "events").write_text("of the user")
    with pytest.raises(CheckpointError, match="'logs' already exists and is not a checkpoint") as caught:
        make(LocalStorage(root), 1, "logs")
    assert caught.value.code == "checkpoint-tag"
    assert (root / "logs" if kind == "file" else root / "logs" / "events").read_text() == "of the user"
    assert os.listdir(root) == ["logs"]


def test_a_users_file_in_a_checkpoint_that_is_replaced_is_kept(root: Path) -> None:
    storage = LocalStorage(root)
    make(storage, 1, "best")
    (root / "best" / "notes.txt").write_text("of the user")
    make(storage, 2, "best")
    make(storage, 3)
    assert [path.read_text() for path in root.glob("best.old-*/notes.txt")] == ["of the user"]
    assert torch.equal(read(storage, "best"), values(2))


def test_an_object_store_keeps_files_that_no_save_wrote() -> None:
    storage = open_storage("memory://keeps/run")
    make(storage, 1, "best")
    storage.replace("best/notes.txt", b"of the user")
    make(storage, 2, "best")
    assert [name for name in storage.names("best") if "rank" not in name] == ["manifest.json", "notes.txt"]
    assert len(storage.names("best")) == 4
    assert torch.equal(read(storage, "best"), values(2))
    storage.remove("")


@pytest.mark.parametrize("at", ["manifest", "rename"])
def test_an_object_store_keeps_the_old_one_of_a_tag_until_the_new_manifest_is_there(at: str) -> None:
    storage = open_storage("memory://tag/run")

    def fail(phase: str) -> None:
        if phase == at:
            raise OSError(errno.EIO, "on purpose")

    make(storage, 1, "best")
    with pytest.raises(OSError, match="on purpose"):
        make(storage, 2, "best", on_phase=fail)
    assert torch.equal(read(storage, "best"), values(1))
    assert len(storage.names("best")) == 3
    storage.remove("")


@pytest.mark.parametrize("url", ["memory://partly/run", "folder"])
def test_a_file_that_is_replaced_and_fails_is_not_there_in_part(root: Path, url: str) -> None:
    storage = open_storage(url if "://" in url else root)
    storage.make_folder("")

    def write_half() -> None:
        with storage.replacing("weights.bin") as sink:
            sink.write(memoryview(b"the first half"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert storage.names() == []


def test_where_the_second_rename_fails_the_tag_keeps_its_old_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(root)
    make(storage, 1, "best")
    real = os.rename

    def fail(source: Any, target: Any) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "on purpose")
        real(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="on purpose"):
        make(storage, 2, "best")
    monkeypatch.undo()
    assert sorted(os.listdir(root)) == ["best", "latest"]
    assert torch.equal(read(storage, "best"), values(1))


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("latest", "checkpoint 'step2' is saved, but 'latest' does not name it"),
        ("gc", "checkpoint 'step2' is saved, but what it replaces could not be removed"),
    ],
)
def test_a_failure_after_the_commit_is_reported_and_undoes_nothing(root: Path, phase: str, said: str) -> None:
    storage = LocalStorage(root)
    make(storage, 1)

    def fail(name: str) -> None:
        if name == phase:
            raise OSError(errno.ENOSPC, "on purpose")

    notes = make(storage, 2, on_phase=fail)
    assert len(notes) == 1
    assert notes[0].startswith(said)
    assert torch.equal(newest(storage), values(2))


def test_a_checkpoint_saved_later_by_a_slower_clock_is_the_newest(root: Path) -> None:
    storage = LocalStorage(root)
    make(storage, 1, created="2030-01-01T00:00:10.000000+00:00")
    make(storage, 2, created="2020-01-01T00:00:00.000000+00:00", retention=Retention(keep_last=1))
    make(storage, 3, created="2025-01-01T00:00:00.000000+00:00", retention=Retention(keep_last=2))
    assert [found.folder for found in directory.list_checkpoints(storage)] == ["step3", "step2"]
    assert directory.inspect(storage, "step3").created == "2030-01-01T00:00:10.000002+00:00"


def test_pruning_never_takes_the_last_good_one_when_the_newest_is_damaged(root: Path) -> None:
    storage = LocalStorage(root)
    for step in (1, 2, 3):
        make(storage, step)
    os.truncate(root / "step3" / "rank-00001.safetensors", 100)
    rewrite(root / "step2", lambda raw: b"{nonsense")
    assert prunable(directory.list_checkpoints(storage), Retention(keep_last=1)) == []
    make(storage, 4, retention=Retention(keep_last=2))
    assert sorted(os.listdir(root)) == ["latest", "step1", "step2", "step3", "step4"]
    make(storage, 5, retention=Retention(keep_last=2))
    assert [f.folder for f in directory.list_checkpoints(storage) if f.manifest is not None] == ["step5", "step4"]


def test_a_process_that_dies_while_it_removes_a_checkpoint_leaves_no_half_of_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(root)
    for step in (1, 2):
        make(storage, step)
    killed_in(monkeypatch, "unlink", lambda path, *_: "manifest" in str(path))
    with pytest.raises(SystemExit):
        discard(storage, "step1")
    monkeypatch.undo()
    assert [found.folder for found in directory.list_checkpoints(storage)] == ["step2"]
    make(storage, 3)
    assert sorted(os.listdir(root)) == ["latest", "step2", "step3"]


# short, interrupted and failing reads and writes


def test_short_writes_and_reads_are_carried_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    calls = {"write": 0, "read": 0}

    def short_write(fd: int, data: Any) -> int:
        calls["write"] += 1
        return write(fd, memoryview(data)[:37])

    def short_read(fd: int, buffers: Any, offset: int) -> int:
        calls["read"] += 1
        return preadv(fd, [memoryview(buffers[0])[:41]], offset)

    monkeypatch.setattr(os, "write", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    storage = LocalStorage(root)
    make(storage, 1)
    assert torch.equal(newest(storage), values(1))
    assert calls["write"] > 20
    assert calls["read"] > 20


@pytest.fixture
def interruptions() -> Iterator[list[int]]:
    """A real signal every half millisecond: system calls return early with EINTR."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    yield seen
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_in_the_middle_of_system_calls_change_nothing(root: Path, interruptions: list[int]) -> None:
    storage = LocalStorage(root)
    for step in range(1, 9):
        make(storage, step)
        assert torch.equal(newest(storage), values(step))
    assert len(interruptions) > 5


def direct_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """A list of this process's writes: was it past the page cache, and how many bytes."""
    write, found = os.write, []

    def noted(fd: int, data: Any) -> int:
        found.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", noted)
    return found


@pytest.mark.parametrize("skipped", [0, 1])
def test_whole_pages_go_past_the_page_cache_where_the_file_system_and_the_address_allow_it(
    skipped: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    memory = aligned_empty(4 * PAGE)
    memory.random_()
    data = memoryview(memory.numpy())[skipped : skipped + 3 * PAGE + 10]
    found = direct_writes(monkeypatch)
    with LocalStorage(root).create("a", is_direct=True) as sink:
        if not fcntl.fcntl(sink._fd, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("the file system refuses O_DIRECT")
        sink.write(data[: 2 * PAGE])
        sink.write(data[2 * PAGE :])
        sink.flush()
    assert (root / "a").read_bytes() == bytes(data)
    if skipped:  # some file systems take any address
        assert found[-1][1] in (10, PAGE + 10)
    else:
        assert found == [(True, 2 * PAGE), (True, PAGE), (False, 10)]


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_what_the_system_refuses_to_write_directly_goes_through_the_page_cache(
    refused: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    control, write = fcntl.fcntl, os.write

    def refusing_control(fd: int, command: int, value: int = 0) -> int:
        if refused == "flag" and command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, command, value)

    def refusing_write(fd: int, data: Any) -> int:
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data)

    monkeypatch.setattr(fcntl, "fcntl", refusing_control)
    monkeypatch.setattr(os, "write", refusing_write)
    memory = aligned_empty(4 * PAGE)
    memory.random_()
    with LocalStorage(root).create("a", is_direct=True) as sink:
        for part in memory.split(PAGE):
            sink.write(memoryview(part.numpy()))
        sink.flush()
    assert (root / "a").read_bytes() == memory.numpy().tobytes()


def test_another_error_of_a_direct_write_is_raised(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"), LocalStorage(root).create("a", is_direct=True) as sink:
        sink.write(memoryview(aligned_empty(PAGE).numpy()))


def test_a_write_that_writes_nothing_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    root.mkdir()
    with (
        pytest.raises(OSError, match="nothing was written"),
        LocalStorage(root).create("a") as sink,
    ):
        sink.write(memoryview(b"bytes"))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(root)
    make(storage, 1)
    preadv = os.preadv

    def shrink(fd: int, buffers: Any, offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("rank-00001.safetensors"):
            os.truncate(name, 100)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrink)
    problems = directory.verify(storage, "step1")
    assert len(problems) == 1
    assert "rank-00001.safetensors cannot be read" in str(problems[0])


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename", "mkdir"])
def test_any_call_that_fails_leaves_the_older_checkpoint_and_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Before the commit: the first call of each kind fails, on a path of the new checkpoint."""
    storage = LocalStorage(root)
    make(storage, 1)
    real = getattr(os, call)

    def fail(what: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if "step2.tmp-" in path and not kwargs.get("dir_fd"):
            raise OSError(code, os.strerror(code), path)
        return real(what, *args, **kwargs)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        make(storage, 2)
    monkeypatch.undo()
    assert torch.equal(newest(storage), values(1))
    make(storage, 3)
    assert sorted(os.listdir(root)) == ["latest", "step1", "step3"]


def test_a_folder_that_cannot_be_read_is_a_clear_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(LocalStorage(root), 1)

    def refuse(path: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="the folder cannot be read") as caught:
        directory.list_checkpoints(LocalStorage(root))
    assert caught.value.code == "checkpoint-storage"
