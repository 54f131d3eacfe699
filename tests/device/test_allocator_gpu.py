"""On a GPU, the allocator of the dry run reserves what torch's does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import multiprocessing

from shoal.simulation.memory import CachingAllocator, MemoryBlock

pytestmark = pytest.mark.device


def test_the_allocator_allocates_and_reserves_as_torch_does() -> None:
    """In a process of its own: what other tests left in a segment would be allocated first."""
    multiprocessing.spawn(compare, (), nprocs=1)  # type: ignore[no-untyped-call]


def compare(_: int) -> None:
    rng = random.Random(0)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    allocator = CachingAllocator()
    live: list[tuple[torch.Tensor, MemoryBlock]] = []
    for _ in range(500):
        if live and rng.random() < 0.5:
            tensor, block = live.pop(rng.randrange(len(live)))
            del tensor
            allocator.free(block)
        else:
            nbytes = int(2 ** rng.uniform(0, 26))
            live.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), allocator.allocate(nbytes, "stream")))
        assert torch.cuda.memory_allocated() - before[0] == allocator.allocated
        assert torch.cuda.memory_reserved() - before[1] == allocator.reserved
