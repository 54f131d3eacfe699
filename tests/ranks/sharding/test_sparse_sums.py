"""A table's rows summed over the ranks give the bits of the dense collective, whichever rows each rank has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.sharding.sparse_sum import SparseSum

ALIGNMENT = 8


@given(
    world=st.integers(1, 4),
    num_rows=st.integers(1, 40),
    width=st.integers(1, 20),
    shares=st.lists(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]), min_size=4, max_size=4),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
            (torch.float64, torch.float64),
        ]
    ),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    is_accumulated=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(4, 40, 20, [0.02, 0.0, 0.1, 0.02], (torch.float32, torch.float32), 1 / 3, False, 1)
@example(3, 40, 3, [0.0, 0.0, 0.02, 0.02], (torch.bfloat16, torch.float32), 0.5, True, 2)
@example(2, 1, 20, [1.0, 0.0, 0.0, 0.0], (torch.float32, torch.float32), 0.5, True, 3)
def test_the_sum_of_rows_is_the_dense_sum(
    world: int,
    num_rows: int,
    width: int,
    shares: list[float],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    is_accumulated: bool,
    seed: int,
) -> None:
    unit = world * ALIGNMENT
    numel = -(-num_rows * width // unit) * unit
    random = torch.Generator().manual_seed(seed)
    tables = []
    for share in shares[:world]:
        has_row = torch.rand(num_rows, 1, generator=random) < share
        table = torch.zeros(numel, dtype=dtypes[0])
        values = torch.randn(num_rows, width, generator=random) * has_row
        table[: num_rows * width] = values.reshape(-1).to(dtypes[0])
        tables.append(table)
    start = torch.randn(numel, generator=random).to(dtypes[1])

    def job() -> None:
        here = current_world()
        comm = here.communicator("dp", Mesh.of(world, dp_shard=world, dp_replicate=1))
        rows = SparseSum(comm, num_rows, width)
        mine = tables[here.rank]
        wholes, shards = [], []
        for sums in (comm, rows):
            full = comm.empty(numel, mine.dtype, mine.device).copy_(mine)
            sums.all_reduce(full, scale=scale, label="table").drain()
            wholes.append(full)
            full = comm.empty(numel, mine.dtype, mine.device).copy_(mine)
            shard = numel // world
            out = start[here.rank * shard : (here.rank + 1) * shard].clone()
            sums.reduce_scatter(full, out, scale=scale, accumulate=is_accumulated, label="table").drain()
            shards.append(out)
        assert torch.equal(*wholes)
        assert torch.equal(*shards)

    run_ranks(world, job)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_rank_may_have_its_shard_in_the_table_itself(is_in_place: bool) -> None:
    def job() -> None:
        here = current_world()
        comm = here.communicator("dp", Mesh.of(2, dp_shard=2, dp_replicate=1))
        full = comm.empty(64 * 4, torch.float32, torch.device("cpu")).zero_()
        full.view(64, 4)[[5, 40]] = here.rank + 1.0
        own = full[here.rank * 128 : (here.rank + 1) * 128]
        out = own if is_in_place else torch.full((128,), 7.0)
        SparseSum(comm, 64, 4).reduce_scatter(full, out, scale=0.5, label="table").drain()
        expected = torch.zeros(32, 4)
        expected[5 if here.rank == 0 else 8] = 1.5
        assert torch.equal(out.view(32, 4), expected)

    run_ranks(2, job)
