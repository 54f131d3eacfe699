"""Rows V1 and V2: a disk that fails, comes short, fills up or lies is an error with path and offset, never zeros."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shoal.errors import OutOfMemoryError, TierError
from shoal.memory.disk import DiskTier
from shoal.memory.host import aligned_empty

BLOCK = 8192
Call = Callable[[int, list[memoryview], int], int]


@pytest.fixture(params=["auto", False], ids=["direct", "buffered"])
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DiskTier]:
    made = DiskTier(
        tmp_path, rank=0, num_threads=2, block_nbytes=BLOCK, queue_depth=2, uses_direct=request.param, checks_sums=False
    )
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def summing_tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path, rank=0, num_threads=2, block_nbytes=BLOCK, queue_depth=2, checks_sums=True)
    yield made
    made.close()


def values(nbytes: int) -> torch.Tensor:
    return aligned_empty(nbytes).copy_(torch.arange(nbytes) % 251 + 1)


def replace(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Call, int, list[memoryview], int], int]
) -> None:
    """Put ``fault(real call, fd, buffers, offset)`` in the place of a system call."""
    real: Call = getattr(os, name)
    monkeypatch.setattr(os, name, lambda fd, buffers, offset: fault(real, fd, buffers, offset))


def test_a_read_that_the_device_fails_names_file_and_offset_and_gives_no_zeros(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = tier.allocate("layers.3", 40_960)
    tier.write(extent, values(40_960)).wait()

    def fail(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 2 * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    replace(monkeypatch, "preadv", fail)
    back = aligned_empty(40_960).fill_(77)
    with pytest.raises(TierError) as found:
        tier.read(extent, back).wait()
    assert found.value.code == "tier-io"
    assert "reading for 'layers.3' failed: Input/output error" in str(found.value)
    assert found.value.where in {f"{extent.path}, {8192} bytes at offset {offset}" for offset in (16384, 24576, 32768)}
    assert isinstance(found.value.__cause__, OSError)
    assert (back[16384:] == 77).all()
    monkeypatch.undo()
    tier.read(extent, back).wait()  # the next one, of a device that answers again, is whole
    assert torch.equal(back, values(40_960))


def test_a_write_that_the_device_fails_cannot_be_read_until_it_was_written_again(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = tier.allocate("a", 40_960)
    tier.write(extent, values(40_960)).wait()

    def fail(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    replace(monkeypatch, "pwritev", fail)
    write = tier.write(extent, values(100), 20_480)
    read = tier.read(extent, aligned_empty(40_960))
    with pytest.raises(TierError, match=r"writing for 'a' failed: Input/output error"):
        write.wait()
    with pytest.raises(
        TierError, match=r"'a' are missing, because a write failed: writing for 'a' failed: Input"
    ) as lost:
        read.wait()
    assert lost.value.code == "tier-io"
    monkeypatch.undo()
    tier.read(extent, aligned_empty(20_480)).wait()  # ranges that were not written are unchanged
    tier.write(extent, values(4096), 20_480).wait()
    tier.read(extent, aligned_empty(40_960)).wait()


def test_calls_that_move_less_than_was_asked_for_are_made_again(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = {"preadv": 0, "pwritev": 0}
    for name in num_calls:

        def little(real: Call, fd: int, buffers: list[memoryview], offset: int, name: str = name) -> int:
            num_calls[name] += 1
            return real(fd, [buffers[0][:4096]], offset)

        replace(monkeypatch, name, little)
    extent = tier.allocate("a", 40_960)
    tier.write(extent, values(40_960)).wait()
    back = aligned_empty(40_960)
    tier.read(extent, back).wait()
    assert torch.equal(back, values(40_960))
    assert num_calls == {"preadv": 10, "pwritev": 10}


def test_a_direct_read_that_stops_inside_a_page_goes_on_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, rank=0, num_threads=1, block_nbytes=BLOCK, queue_depth=2)
    assert tier.is_direct
    extent = tier.allocate("a", 16_384)
    tier.write(extent, values(16_384)).wait()
    offsets = []

    def short(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        moved = real(fd, buffers, offset)
        return 5000 if offset == 0 else moved

    replace(monkeypatch, "preadv", short)
    back = aligned_empty(16_384)
    tier.read(extent, back).wait()
    tier.close()
    assert offsets == [0, 4096]
    assert torch.equal(back, values(16_384))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_device_that_moves_nothing_is_an_error_after_a_few_calls(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    extent = tier.allocate("a", 4096)
    tier.write(extent, values(4096)).wait()
    calls = []

    def nothing(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return 0

    replace(monkeypatch, name, nothing)
    move = tier.read if name == "preadv" else tier.write
    with pytest.raises(TierError, match="transferred nothing, 8 times in a row"):
        move(extent, aligned_empty(4096)).wait()
    assert calls == [0] * 8


@pytest.mark.parametrize("size", [0, 8192, 12_288, 20_481])
def test_a_file_that_was_truncated_after_the_write_is_an_error(tier: DiskTier, size: int) -> None:
    extent = tier.allocate("a", 40_000)
    tier.write(extent, values(40_000)).wait()
    os.truncate(extent.path, size)
    back = aligned_empty(40_000).fill_(77)
    for move in (tier.read, tier.write):
        with pytest.raises(TierError) as found:
            move(extent, back).wait()
        assert found.value.code == "tier-truncated"
        assert f"the file ends at {size}, but bytes up to 40000 were written to it" in str(found.value)
        assert found.value.where == f"{extent.path}, 40000 bytes at offset 0"
    assert (back == 77).all()


def test_a_file_that_is_truncated_during_the_read_is_an_error(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = tier.allocate("a", 16_384)
    tier.write(extent, values(16_384)).wait()

    def cut_off(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(extent.path, 10_000)
        return real(fd, buffers, offset)

    replace(monkeypatch, "preadv", cut_off)
    with pytest.raises(TierError, match=r"the file ends at 10000") as found:
        tier.read(extent, aligned_empty(16_384)).wait()
    assert found.value.code == "tier-truncated"


def test_a_file_that_is_gone_or_another_is_an_error(tier: DiskTier) -> None:
    extent = tier.allocate("a", 4096)
    tier.write(extent, values(4096)).wait()
    os.rename(extent.path, extent.path + ".aside")
    with pytest.raises(TierError, match=r"opening the file for 'a' failed: No such file or directory"):
        tier.read(extent, aligned_empty(4096)).wait()
    Path(extent.path).write_bytes(bytes(4096))
    with pytest.raises(TierError, match="another file has replaced it") as found:
        tier.read(extent, aligned_empty(4096)).wait()
    assert found.value.code == "tier-replaced"
    os.unlink(extent.path)
    os.symlink(extent.path + ".aside", extent.path)
    with pytest.raises(TierError, match="opening the file for 'a' failed"):
        tier.read(extent, aligned_empty(4096)).wait()
    os.replace(extent.path + ".aside", extent.path)


@pytest.mark.parametrize("start", [0, 8192, 35_000])
def test_a_bit_that_turned_is_found_by_the_sums(summing_tier: DiskTier, start: int) -> None:
    extent = summing_tier.allocate("a", 40_000)
    summing_tier.write(extent, values(40_000)).wait()
    with open(extent.path, "r+b") as file:
        file.seek(start + 5)
        before = file.read(1)[0]
        file.seek(start + 5)
        file.write(bytes([before ^ 1]))
    block = start // BLOCK * BLOCK
    for nbytes, offset in ((40_000, 0), (10, start)):
        with pytest.raises(TierError, match="is not what was written: its xxh3 is ") as found:
            summing_tier.read(extent, torch.empty(nbytes, dtype=torch.uint8), offset).wait()
        assert found.value.code == "tier-damaged"
        assert found.value.where == f"{extent.path}, 8192 bytes at offset {block}"
    with pytest.raises(TierError, match="is not what was written"):  # a write of a part must not make it right
        summing_tier.write(extent, values(10), start + 10).wait()


def test_a_file_that_was_truncated_and_grew_again_is_found_by_the_checksums(summing_tier: DiskTier) -> None:
    extent = summing_tier.allocate("a", 40_960)
    summing_tier.write(extent, values(40_960)).wait()
    os.truncate(extent.path, 16_384)
    os.truncate(extent.path, 40_960)
    summing_tier.read(extent, aligned_empty(16_384)).wait()
    with pytest.raises(TierError, match="is not what was written"):
        summing_tier.read(extent, aligned_empty(40_960)).wait()


def test_a_failed_write_takes_its_sums_with_it(summing_tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = summing_tier.allocate("a", 40_960)
    summing_tier.write(extent, values(40_960)).wait()

    def fail(real: Call, fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    replace(monkeypatch, "pwritev", fail)
    with pytest.raises(TierError, match="Input/output error"):
        summing_tier.write(extent, values(100), 100).wait()
    monkeypatch.undo()
    with pytest.raises(TierError, match="because a write failed"):
        summing_tier.read(extent, torch.empty(10, dtype=torch.uint8), 5000).wait()  # in the same block
    # The block has no sum now: a write of a part of it, which reads the block first, is not refused.
    summing_tier.write(extent, values(5000)).wait()
    summing_tier.write(extent, values(BLOCK - 5000), 5000).wait()
    back = aligned_empty(40_960)
    summing_tier.read(extent, back).wait()
    assert torch.equal(back[:BLOCK], torch.cat([values(5000), values(BLOCK - 5000)]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip("a file system can be mounted by the superuser only")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def test_a_full_disk_is_an_error_with_what_is_needed_and_available_and_leaves_no_file(small_disk: Path) -> None:
    tier = DiskTier(small_disk, rank=0, num_threads=1, block_nbytes=BLOCK)
    with pytest.raises(OutOfMemoryError, match=r"4 MiB \(4194304 bytes\) are needed") as found:
        tier.reserve(4 * 2**20)
    assert found.value.code == "tier-no-room"
    tier.allocate("fits", 2**20)
    with pytest.raises(OutOfMemoryError, match=r"making room for 'more' failed \(No space left on device\)") as found:
        tier.allocate("more", 2 * 2**20)
    assert "2 MiB (2097152 bytes) are needed" in str(found.value)
    assert sorted(os.listdir(tier.path)) == ["extent-0000.bin", "owner.json"]
    again = tier.allocate("more", 65_536)  # the failed one has freed its space
    tier.write(again, values(65_536)).wait()
    tier.close()
    assert os.listdir(small_disk) == []


def fill_up(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_that_fills_up_while_running_is_an_error_of_the_write(small_disk: Path) -> None:
    """A hole frees the allocated space, as file systems do that copy on write."""
    tier = DiskTier(small_disk, rank=0, num_threads=1, block_nbytes=BLOCK)
    extent = tier.allocate("a", 2**20)
    os.truncate(extent.path, 0)
    os.truncate(extent.path, 2**20)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        fill_up(filler)
    with pytest.raises(OutOfMemoryError, match=r"writing for 'a' failed \(No space left on device\)") as found:
        tier.write(extent, values(2**20)).wait()
    assert found.value.code == "tier-no-room"
    assert "0 B (0 bytes) are available" in str(found.value)
    assert found.value.where.startswith(f"{extent.path}, ")
    with pytest.raises(TierError, match="because a write failed") as lost:
        tier.read(extent, aligned_empty(10)).wait()
    assert lost.value.code == "tier-no-room"
    filler.unlink()
    tier.write(extent, values(2**20)).wait()
    tier.close()


def test_a_limit_on_a_files_size_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    program = """
import os, resource, sys
from shoal.errors import OutOfMemoryError
from shoal.memory.disk import DiskTier
tier = DiskTier(sys.argv[1], rank=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
tier.allocate("fits", 65536)
try:
    tier.allocate("large", 65537)
except OutOfMemoryError as error:
    print(error.code, "68 KiB (69632 bytes) are needed" in str(error), "File too large" in str(error))
print(sorted(os.listdir(tier.path)))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    expected = ["tier-no-room True True", "['extent-0000.bin', 'owner.json']"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert list(tmp_path.iterdir()) == []
