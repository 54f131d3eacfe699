"""What is read from the disk tier is what was written, at any offset, length and alignment, in every way of access."""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import OutOfMemoryError, TierError, UsageError
from shoal.memory import disk
from shoal.memory.disk import DiskTier
from shoal.memory.host import aligned_empty
from shoal.memory.transfer import Cut, cut

WAYS = [(True, False), (True, True), (False, False), (False, True)]
MakeTier = Callable[..., DiskTier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    made: list[DiskTier] = []

    def make(**options: Any) -> DiskTier:
        settings = {"rank": 0, "num_threads": 2, "block_nbytes": 8192, "queue_depth": 4, **options}
        made.append(DiskTier(tmp_path, **settings))
        return made[-1]

    yield make
    for tier in made:
        tier.close()
    assert list(tmp_path.iterdir()) == []


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("is_direct", "checks_sums"), WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_tensor_comes_back_bit_for_bit(
    make_tier: MakeTier, dtype: torch.dtype, is_direct: bool, checks_sums: bool
) -> None:
    tier = make_tier(uses_direct="auto" if is_direct else False, checks_sums=checks_sums)
    tensor = torch.randn(33, 517).to(dtype)
    extent = tier.allocate("layers.0/exp_avg", tensor.nbytes)
    tier.write(extent, tensor).wait()
    back = torch.empty_like(tensor)
    tier.read(extent, back).wait()
    assert torch.equal(back, tensor)
    assert (tier.traffic.written_nbytes, tier.traffic.read_nbytes) == (tensor.nbytes, tensor.nbytes)


def test_a_read_sees_every_write_that_was_asked_for_before_it(make_tier: MakeTier) -> None:
    tier = make_tier(num_threads=3)
    extent = tier.allocate("a", 50_000)
    backs = []
    for value in range(6):
        tier.write(extent, torch.full((50_000,), value, dtype=torch.uint8))
        back = aligned_empty(50_000)
        backs.append((tier.read(extent, back), back))
    for value, (ticket, back) in enumerate(backs):
        ticket.wait()
        assert (back == value).all()


@settings(max_examples=15)
@given(
    way=st.sampled_from(WAYS),
    nbytes=st.integers(1, 70_000),
    data=st.data(),
)
def test_writes_and_reads_of_parts_agree_with_a_tensor(
    make_tier: MakeTier, way: tuple[bool, bool], nbytes: int, data: st.DataObject
) -> None:
    tier = make_tier(uses_direct="auto" if way[0] else False, checks_sums=way[1])
    extent = tier.allocate("x", nbytes)
    model = pattern(nbytes)
    tier.write(extent, model.clone())
    for seed in range(5):
        start = data.draw(st.integers(0, nbytes) | st.sampled_from(range(0, nbytes + 1, 4096)))
        stop = data.draw(st.integers(start, nbytes))
        skipped = data.draw(st.sampled_from([0, 64, 1]))
        memory = aligned_empty(stop - start + skipped)[skipped:]
        model[start:stop] = pattern(stop - start, seed)
        memory.copy_(model[start:stop])
        tier.write(extent, memory, start)
        back = torch.zeros(stop - start, dtype=torch.uint8)
        tier.read(extent, back, start).wait()
        assert torch.equal(back, model[start:stop])
    back = torch.zeros(nbytes, dtype=torch.uint8)
    tier.read(extent, back).wait()
    tier.close()
    assert torch.equal(back, model)


@given(
    start=st.integers(0, 500),
    length=st.integers(0, 500),
    grain=st.sampled_from([1, 4, 16]),
    num_grains=st.integers(1, 8),
    is_aligned=st.booleans(),
)
def test_chunks_cover_a_range_once_and_only_aligned_ones_are_direct(
    start: int, length: int, grain: int, num_grains: int, is_aligned: bool
) -> None:
    size = grain * num_grains
    parts = list(cut(start, start + length, grain=grain, part_nbytes=size, is_aligned=is_aligned))
    assert [part.start for part in parts] == [start, *(part.stop for part in parts[:-1])][: len(parts)]
    assert (parts[-1].stop if parts else start) == start + length
    for part in parts:
        assert part.start < part.stop
        assert part.start // size == (part.stop - 1) // size  # so it fits a bounce buffer, grains and all
        is_whole = part.start % grain == part.stop % grain == 0
        assert part.is_bounced == (not is_aligned or not is_whole)


def test_an_aligned_unit_is_split_into_few_large_parts() -> None:
    parts = list(cut(0, 5 * 2**20 + 100, grain=4096, part_nbytes=2 * 2**20, is_aligned=True))
    assert parts == [
        Cut(0, 2097152, False),
        Cut(2097152, 4194304, False),
        Cut(4194304, 5242880, False),
        Cut(5242880, 5242980, True),
    ]


def test_memory_on_a_page_is_handed_to_the_kernel_where_it_lies(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    assert tier.is_direct, "the file system of the tests' folder takes O_DIRECT"
    seen: list[tuple[int, int, int]] = []
    pwritev = os.pwritev

    def watch(fd: int, buffers: list[memoryview], offset: int) -> int:
        address = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr()
        seen.append((offset, address, len(buffers[0])))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watch)
    memory = aligned_empty(40_000).fill_(1)
    tier.write(tier.allocate("a", 40_000), memory).wait()
    begin = memory.data_ptr()
    assert sorted(seen)[:3] == [(0, begin, 16384), (16384, begin + 16384, 16384), (32768, begin + 32768, 4096)]
    assert [(offset, size) for offset, _, size in sorted(seen)[3:]] == [(36864, 4096)]
    assert all(address % 4096 == offset % 4096 == size % 4096 == 0 for offset, address, size in seen)


def test_nothing_can_be_read_that_was_not_written(make_tier: MakeTier) -> None:
    tier = make_tier()
    extent = tier.allocate("a", 10_000)
    with pytest.raises(UsageError, match="bytes 0 to 10 of 'a' were never written") as found:
        tier.read(extent, torch.empty(10, dtype=torch.uint8)).wait()
    assert found.value.code == "tier-not-written"
    tier.write(extent, pattern(5000)).wait()
    tier.read(extent, torch.empty(5000, dtype=torch.uint8)).wait()
    with pytest.raises(UsageError, match="bytes 4999 to 5001"):
        tier.read(extent, torch.empty(2, dtype=torch.uint8), 4999).wait()


def test_an_empty_extent_and_an_empty_tensor_are_nothing_special(make_tier: MakeTier) -> None:
    tier = make_tier()
    extent = tier.allocate("none", 0)
    tier.write(extent, torch.empty(0)).wait()
    tier.read(extent, torch.empty(0, 4)).wait()
    assert [extent.file_nbytes for extent in tier._extents.values()] == [0]


@pytest.mark.parametrize(
    ("tensor", "offset", "message"),
    [
        (torch.zeros(101, dtype=torch.uint8), 0, "101 bytes at offset 0 are not inside 'a', which has 100"),
        (torch.zeros(25), 1, "100 bytes at offset 1"),
        (torch.zeros(1), -1, "at offset -1"),
        (torch.zeros(4, 4).t(), 0, r"contiguous host memory; .* shape \(4, 4\), stride \(1, 4\)"),
        (torch.zeros(4, device="meta"), 0, "this tensor is on meta"),
    ],
    ids=["too long", "too far", "before", "strided", "elsewhere"],
)
def test_a_tensor_that_cannot_be_written_is_refused_at_once(
    make_tier: MakeTier, tensor: torch.Tensor, offset: int, message: str
) -> None:
    tier = make_tier()
    extent = tier.allocate("a", 100)
    for move in (tier.write, tier.read):
        with pytest.raises(UsageError, match=message):
            move(extent, tensor, offset)


def test_extents_have_names_and_are_freed(make_tier: MakeTier) -> None:
    tier = make_tier()
    first, second = tier.allocate("a", 5000), tier.allocate("b", 4096)
    assert [(e.name, e.nbytes, e.file_nbytes) for e in tier._extents.values()] == [("a", 5000, 8192), ("b", 4096, 4096)]
    assert os.stat(first.path).st_blocks * 512 >= 8192  # taken on the disk, not only promised
    with pytest.raises(UsageError, match="the name is taken"):
        tier.allocate("a", 1)
    ticket = tier.write(first, pattern(5000))
    tier.free(first)
    ticket.wait()
    assert not os.path.exists(first.path)
    for use in (lambda: tier.free(first), lambda: tier.write(first, pattern(5)), lambda: tier.read(first, pattern(5))):
        with pytest.raises(UsageError, match="not an extent of this tier, or was freed"):
            use()
    again = tier.allocate("a", 100)
    with pytest.raises(UsageError, match="never written"):
        tier.read(again, pattern(5)).wait()
    assert os.path.exists(second.path)


def test_free_space_is_checked_before_the_run(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier()
    monkeypatch.setattr(disk, "free_nbytes", lambda folder: 100_000)
    tier.reserve(40_960)
    assert tier.available_nbytes == 59_040
    with pytest.raises(OutOfMemoryError) as found:
        tier.reserve(60_000)
    assert found.value.code == "tier-no-room"
    assert "58.6 KiB (60000 bytes) are needed, 57.7 KiB (59040 bytes) are available" in str(found.value)
    with pytest.raises(OutOfMemoryError, match=r"by 2 ranks: .*\(60000 bytes\) are needed"):
        tier.reserve(30_000, num_ranks=2)
    tier.allocate("a", 40_000)  # uses up what was reserved
    assert tier.available_nbytes == 100_000


def test_more_than_any_disk_is_refused(make_tier: MakeTier) -> None:
    with pytest.raises(OutOfMemoryError, match=r"8192 PiB|\(9223372036854775807 bytes\) are needed"):
        make_tier().reserve(2**63 - 1)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_a_file_system_without_direct_access_is_used_through_the_page_cache_and_the_log_says_so(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.INFO, logger="shoal"):
        tier = make_tier()
    assert not tier.is_direct
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} refuses direct access (O_DIRECT: Invalid argument); state is read and written through the page "
        "cache."
    ]
    extent = tier.allocate("a", 9001)
    tier.write(extent, pattern(9001))
    back = torch.empty(9001, dtype=torch.uint8)
    tier.read(extent, back).wait()
    assert torch.equal(back, pattern(9001))


def test_direct_access_that_must_be_and_cannot_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_direct(monkeypatch)
    with pytest.raises(TierError, match=r"refuses direct access \(O_DIRECT\): Invalid argument") as found:
        DiskTier(tmp_path, rank=0, uses_direct=True)
    assert found.value.code == "tier-no-direct"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["num_threads", "block_nbytes", "queue_depth", "max_pending"])
def test_numbers_below_one_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} 0"):
        DiskTier(tmp_path, rank=0, **{name: 0})
    assert list(tmp_path.iterdir()) == []


def test_two_tiers_of_one_process_share_a_folder(make_tier: MakeTier) -> None:
    one, two = make_tier(), make_tier()
    assert one.path != two.path
    one.write(one.allocate("a", 10), pattern(10, 1)).wait()
    two.write(two.allocate("a", 10), pattern(10, 2)).wait()
    back = torch.empty(10, dtype=torch.uint8)
    one.read(one._extents["a"], back).wait()
    assert torch.equal(back, pattern(10, 1))


def test_closing_removes_the_files_and_later_use_is_refused(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, rank=0, num_threads=1)
    extent = tier.allocate("a", 10)
    tier.close()
    tier.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="tier-closed"):
        tier.write(extent, pattern(10))
    with pytest.raises(UsageError, match="the tier closed"):
        tier.allocate("b", 10)


def test_a_tier_without_references_is_closed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, rank=0, num_threads=1)
    tier.write(tier.allocate("a", 10), pattern(10)).wait()
    tier.drain()
    del tier
    gc.collect()
    assert list(tmp_path.iterdir()) == []
