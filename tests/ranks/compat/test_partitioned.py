"""``PartitionedTensor`` and ``reduce_scatter_coalesced``, over a process group that a script made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.compat.deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from shoal.compat.partitioned_tensor import PartitionedTensor
from shoal.errors import UsageError


def there_and_back(rank: int, size: int, rows: int) -> list[Any]:
    whole = torch.arange(rows * 3.0).view(rows, 3)
    group = torch.distributed.group.WORLD
    held = PartitionedTensor(whole, group)
    meta = held.to_meta()
    again = PartitionedTensor.from_meta(meta, held.data(), group)
    uneven = PartitionedTensor(whole, group, [0, 1, *[rows * 3] * (size - 1)])
    assert held.full_size() == again.full_size() == [rows, 3]
    for one in (held, again, uneven):
        assert torch.equal(one.full(), whole)
    meta[4] += 1
    with pytest.raises(UsageError, match="the description is of rank"):
        PartitionedTensor.from_meta(meta, held.data(), group)
    with pytest.raises(UsageError, match="does not split"):
        PartitionedTensor(whole, group, [0] * (size + 1))
    return [held.local_size()[0], uneven.local_size()[0], held.partition]


@pytest.mark.parametrize("rows", [3, 4])
def test_the_ranges_are_the_tensor(gloo: Callable[..., list[Any]], rows: int) -> None:
    expected = {3: [0, 5, 9], 4: [0, 6, 12]}[rows]
    found = gloo(2, there_and_back, rows)
    assert found == [
        [expected[1], 1, expected],
        [expected[2] - expected[1], rows * 3 - 1, expected],
    ]


def means(rank: int, size: int) -> list[list[float]]:
    tensors = [
        torch.full((2, 3), float(rank)),
        torch.arange(5.0) * (rank + 1),
        torch.full((1,), 4.0 + rank, dtype=torch.float32),
        torch.zeros(0),
    ]
    kept = [tensor.clone() for tensor in tensors]
    found = reduce_scatter_coalesced(tensors, torch.distributed.group.WORLD)
    assert all(torch.equal(now, before) for now, before in zip(tensors, kept, strict=True))
    return [part.tolist() for part in found]


def test_several_tensors_are_averaged_and_each_rank_gets_its_range(gloo: Callable[..., list[Any]]) -> None:
    assert gloo(2, means) == [
        [[0.5, 0.5, 0.5], [0.0, 1.5, 3.0], [4.5], []],
        [[0.5, 0.5, 0.5], [4.5, 6.0], [], []],
    ]
