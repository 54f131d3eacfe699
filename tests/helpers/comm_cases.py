"""Every collective against the plain formula, on one communicator: what the tests of each transport run."""

from __future__ import annotations

from functools import lru_cache

import torch

from shoal.comm.protocol import Communicator
from shoal.comm.world import World, current_world
from shoal.mesh import Mesh

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def data_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The tensor of ``rank``; any rank can compute any rank's."""
    return _data(rank, numel, dtype, seed).clone()


@lru_cache(maxsize=512)
def _data(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def sum_of(size: int, numel: int, dtype: torch.dtype, seed: int, scale: float) -> torch.Tensor:
    """The sum in rank order, in fp32, scaled, not yet rounded."""
    total = data_of(0, numel, dtype, seed).float()
    for rank in range(1, size):
        total = total + data_of(rank, numel, dtype, seed).float()
    return total * scale


def check_every_collective(comm: Communicator, dtype: torch.dtype, shard: int) -> None:
    rank, size = comm.rank, comm.size
    numel = shard * size
    own = slice(rank * shard, (rank + 1) * shard)
    cpu = torch.device("cpu")

    def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert got.dtype == expected.dtype and torch.equal(got, expected), (what, dtype, shard, rank, size)

    for registered in (False, True):

        def hold(values: torch.Tensor, registered: bool = registered) -> torch.Tensor:
            return comm.empty(values.numel(), values.dtype, cpu).copy_(values) if registered else values.clone()

        everything = torch.cat([data_of(peer, shard, dtype, 1) for peer in range(size)])
        full = hold(torch.full((numel,), float("nan"), dtype=dtype))
        piece = hold(data_of(rank, shard, dtype, 1))
        same(comm.all_gather(full, piece, label="gather").wait(), everything, "all_gather of a shard")
        comm.drain()

        full = hold(torch.full((numel,), float("nan"), dtype=dtype))
        full[own] = data_of(rank, shard, dtype, 1)
        work = comm.all_gather(full, label="gather own range")
        assert work.wait() is full
        same(full, everything, "all_gather of the own range")
        work.drain()

        for scale in (1.0, 1 / 3):
            expected = sum_of(size, numel, dtype, 2, scale)
            full = hold(data_of(rank, numel, dtype, 2))
            for out_dtype in dict.fromkeys((dtype, torch.float32)):
                out = torch.empty(shard, dtype=out_dtype)
                work = comm.reduce_scatter(full, out, scale=scale, label="reduce")
                assert work.wait() is out
                same(out, expected[own].to(out_dtype), "reduce_scatter")
                work.drain()
                start = data_of(rank, shard, out_dtype, 3)
                out = start.clone()
                comm.reduce_scatter(full, out, scale=scale, accumulate=True, label="accumulate").drain()
                same(out, (start.float() + expected[own]).to(out_dtype), "reduce_scatter that accumulates")
            comm.reduce_scatter(full, full[own], scale=scale, label="in place").wait()
            same(full[own], expected[own].to(dtype), "reduce_scatter in place")
            comm.drain()

            for odd in (numel, numel + 1, max(1, size - 1)):
                full = hold(data_of(rank, odd, dtype, 4))
                work = comm.all_reduce(full, scale=scale, label="all")
                assert work.wait() is full
                same(full, sum_of(size, odd, dtype, 4, scale).to(dtype), "all_reduce")
                work.drain()

        for source in range(size):
            tensor = hold(data_of(rank, shard, dtype, 5))
            comm.broadcast(tensor, source, label="broadcast").drain()
            same(tensor, data_of(source, shard, dtype, 5), "broadcast")

    vector = data_of(rank, 3, dtype, 6)
    work = comm.exchange(vector, label="exchange")
    vector.zero_()  # a small vector is copied when it is issued
    same(work.wait(), torch.stack([data_of(peer, 3, dtype, 6) for peer in range(size)]), "exchange")
    found = comm.exchange_on_host([rank, 0.5], label="numbers")
    assert found == [[float(peer), 0.5] for peer in range(size)]
    objects = [{"rank": peer, "text": "ü" * peer} for peer in range(size)]
    assert comm.gather_objects(objects[rank], label="objects") == objects
    comm.barrier(label="barrier")
    comm.drain()


def check_all(comm: Communicator) -> None:
    for dtype in DTYPES:
        for shard in (1, 7, 4096, 70_001):
            check_every_collective(comm, dtype, shard)


def check_any_order(comm: Communicator) -> None:
    """Works are waited for in another order on every rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    for round_ in range(5):
        fulls = [data_of(comm.rank, 24 * comm.size, torch.float32, 10 * round_ + index) for index in range(12)]
        outs = [torch.empty(24) for _ in fulls]
        works = [
            comm.all_reduce(full, label=f"all {index}")
            if index % 2
            else comm.reduce_scatter(full, outs[index], label=f"scatter {index}")
            for index, full in enumerate(fulls)
        ]
        for index in torch.randperm(12, generator=generator).tolist():
            got = works[index].wait()
            expected = sum_of(comm.size, 24 * comm.size, torch.float32, 10 * round_ + index, 1.0)
            assert torch.equal(got, expected if index % 2 else expected[24 * comm.rank : 24 * (comm.rank + 1)])
        comm.drain()


def check_two_axes(world: World) -> None:
    """All-reduces on two axes, waited for in opposite orders by neighbouring ranks."""
    mesh = Mesh.of(world.size, dp_replicate=2)
    inner, outer = world.communicator("dp_shard", mesh), world.communicator("dp_replicate", mesh)
    one, other = torch.full((10,), 1.0 + world.rank), torch.full((10,), 1.0 + world.rank)
    works = [inner.all_reduce(one, label="inner"), outer.all_reduce(other, label="outer")]
    for work in works if world.rank % 2 else reversed(works):
        work.wait()
    assert one.tolist() == [sum(1.0 + rank for rank in mesh.ranks_along("dp_shard", world.rank))] * 10
    assert other.tolist() == [sum(1.0 + rank for rank in mesh.ranks_along("dp_replicate", world.rank))] * 10


def current_dp() -> Communicator:
    world = current_world()
    return world.communicator("dp", Mesh.of(world.size))
