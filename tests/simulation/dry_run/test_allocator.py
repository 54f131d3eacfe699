"""The caching allocator of PyTorch as arithmetic: blocks, segments, reuse, and what is reserved."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shoal.simulation.memory import CachingAllocator, MemoryBlock

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off a large block
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_a_request_is_rounded_and_served_from_a_segment_of_its_kind(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes, "compute")
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_of_the_same_stream_is_used_again() -> None:
    allocator = CachingAllocator()
    large, small = (allocator.allocate(size * MIB, "compute") for size in (64, 32))
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB, "compute").address == small.address
    assert allocator.allocate(30 * MIB, "copies").address not in (small.address, large.address)
    assert allocator.reserved == (64 + 32 + 30) * MIB
    assert allocator.allocate(33 * MIB, "compute").address == large.address
    assert allocator.reserved == (64 + 32 + 30) * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(4 * MIB, "compute") for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for index in (1, 3, 2):
        allocator.free(parts[index])
    again = allocator.allocate(12 * MIB, "compute")
    assert (again.address, allocator.reserved) == (parts[1].address, 20 * MIB)


def test_free_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB, "compute"))
    kept = allocator.allocate(40 * MIB, "copies")
    assert (allocator.reserved, allocator.has_failed) == (40 * MIB, False)
    allocator.allocate(30 * MIB, "compute")
    assert (allocator.reserved, allocator.has_failed) == (70 * MIB, True)
    allocator.free(kept)
    allocator.release_cached()
    assert allocator.reserved == 30 * MIB


def test_segments_of_a_pool_apart_are_used_whole_and_stay() -> None:
    allocator = CachingAllocator()
    first, second = (allocator.allocate(size * MIB, "compute", "pool") for size in (32, 48))
    assert allocator.free_nbytes("pool") == 0
    allocator.free(first)
    allocator.free(second)
    allocator.free(allocator.allocate(64 * MIB, "compute"))
    allocator.release_cached()
    assert allocator.reserved == allocator.free_nbytes("pool") == (32 + 48) * MIB
    again = allocator.allocate(20 * MIB, "compute", "pool")
    assert (again.address, again.nbytes) == (first.address, 32 * MIB)
    assert allocator.allocate(20 * MIB, "compute").address not in (first.address, second.address)
    assert allocator.allocate(20 * MIB, "compute", "pool").address == second.address


@pytest.mark.parametrize("seed", range(5))
def test_blocks_do_not_overlap_and_add_up(seed: int) -> None:
    rng = random.Random(seed)
    allocator = CachingAllocator()
    live: list[tuple[MemoryBlock, int]] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            block, nbytes = live.pop(rng.randrange(len(live)))
            assert block.nbytes >= nbytes
            allocator.free(block)
        else:
            nbytes = int(2 ** rng.uniform(0, 26))
            live.append((allocator.allocate(nbytes, rng.choice("ab")), nbytes))
        assert allocator.allocated == sum(block.nbytes for block, _ in live) <= allocator.reserved
    spans = sorted((block.address, block.address + block.nbytes) for block, _ in live)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for block, _ in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
