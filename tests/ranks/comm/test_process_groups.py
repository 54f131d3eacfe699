"""torch's process groups and device meshes of Shoal's axes, for threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shoal.comm.threads import run_ranks
from shoal.comm.world import World, current_world, fake_world
from shoal.errors import NotBuiltError
from shoal.mesh import Mesh
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]


def check_operations(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """torch.distributed's functions on a group, against what they are documented to do."""
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    every = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * peer for peer in range(size)]
    for op, expected in (
        (dist.ReduceOp.SUM, torch.stack(every).sum(0)),
        (dist.ReduceOp.MAX, every[-1]),
        (dist.ReduceOp.MIN, every[0]),
    ):
        for tensor in (own.clone(), own.t().clone().t()):  # contiguous, and not
            dist.all_reduce(tensor, op, group=group)
            assert torch.equal(tensor, expected)
    tensor = own.clone()
    dist.broadcast(tensor, group=group, group_src=size - 1)
    assert torch.equal(tensor, every[-1])
    outputs = [torch.empty(2, 2) for _ in range(size)]
    dist.all_gather(outputs, own, group=group)
    assert torch.equal(torch.stack(outputs), torch.stack(every))
    output = torch.empty(2, 2)
    dist.reduce_scatter(output, [own * (peer + 1) for peer in range(size)], group=group)
    assert torch.equal(output, torch.stack(every).sum(0) * (rank + 1))
    rows = torch.arange(3.0 * size).view(3 * size, 1) + 100 * rank
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    assert received.flatten().tolist() == [
        100.0 * peer + 3 * rank + index for peer in range(size) for index in range(3)
    ]
    splits = [rank + 1] * size
    received = torch.empty(sum(peer + 1 for peer in range(size)), 1)
    dist.all_to_all_single(
        received, torch.full((sum(splits), 1), float(rank)), [peer + 1 for peer in range(size)], splits, group=group
    )
    assert received.flatten().tolist() == [float(peer) for peer in range(size) for _ in range(peer + 1)]
    scattered = torch.empty(2)
    sources = [torch.full((2,), float(peer)) for peer in range(size)] if rank == 0 else None
    dist.scatter(scattered, sources, group=group, group_src=0)
    assert scattered.tolist() == [float(rank)] * 2
    if size > 1:
        message = torch.empty(2, 2)
        receive = dist.irecv(message, group=group, group_src=(rank - 1) % size)
        send = dist.isend(own, group=group, group_dst=(rank + 1) % size)
        for work in (receive, send):
            assert work is not None
            work.wait()
        assert torch.equal(message, every[(rank - 1) % size])
    dist.barrier(group=group)


def check_dtensors(world: World, mesh: Mesh) -> None:
    """Every redistribution of a DTensor on a 2-D mesh."""
    device_mesh = world.device_mesh(mesh, ("dp_replicate", "dp_shard"))
    assert device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    assert tuple(coordinate) == divmod(world.rank, 2)
    assert device_mesh.get_rank() == world.rank
    assert (device_mesh.get_local_rank("dp_replicate"), device_mesh.get_local_rank(1)) == tuple(coordinate)
    whole = torch.arange(32.0).view(4, 8)
    local = whole.chunk(2, 0)[world.rank % 2]
    tensor = DTensor.from_local(local, device_mesh, [Replicate(), Shard(0)], run_check=False)
    assert torch.equal(tensor.full_tensor(), whole)
    other = tensor.redistribute(placements=[Shard(0), Shard(1)])
    assert torch.equal(other.full_tensor(), whole)
    assert torch.equal(
        tensor.redistribute(placements=[Replicate(), Shard(1)]).to_local(), whole.chunk(2, 1)[world.rank % 2]
    )
    partial = DTensor.from_local(whole * (1 + world.rank), device_mesh, [Partial(), Partial()], run_check=False)
    assert torch.equal(partial.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), 10 * whole)
    weight = tensor.detach().requires_grad_()
    product = weight @ weight.t()
    assert torch.allclose(product.full_tensor(), whole @ whole.t())
    product.sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert torch.allclose(weight.grad.full_tensor(), 2 * whole.sum(0).expand(4, 8))


def check_groups(world: World) -> None:
    mesh = Mesh.of(world.size, dp_replicate=2)
    for axis in ("world", "dp_shard", "dp_replicate", "tp"):
        group = world.process_group(axis, mesh)
        assert world.process_group(axis, mesh) is group
        assert (group.rank(), group.size()) == (mesh.index(axis, world.rank), mesh.size(axis))
        check_operations(group, group.rank(), group.size())
    check_dtensors(world, mesh)


def test_thread_ranks_have_groups_and_meshes_of_torch() -> None:
    before = len(dist.distributed_c10d._world.pg_names)
    run_ranks(4, lambda: check_groups(current_world()))
    assert len(dist.distributed_c10d._world.pg_names) == before
    assert not dist.is_initialized()


def groups_among_processes(rank: int, size: int) -> int:
    before = len(dist.distributed_c10d._world.pg_names)
    world = own_world(rank, size, "groups", True)
    check_groups(world)
    world.close()
    return len(dist.distributed_c10d._world.pg_names) - before


def groups_after_a_script_made_its_own(rank: int, size: int) -> None:
    """Rank 0 has one group more, which the others know nothing of."""
    own = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    world = own_world(rank, size, "after", True)
    group = world.process_group("dp_shard", Mesh.of(size, dp_replicate=2))
    check_operations(group, group.rank(), group.size())
    world.close()
    if own is not None:
        dist.destroy_process_group(own)


def test_groups_of_a_script_on_some_ranks_do_not_keep_the_ranks_of_a_group_apart(gloo: Gloo) -> None:
    gloo(4, groups_after_a_script_made_its_own)


def test_processes_have_groups_and_meshes_of_torch(gloo: Gloo) -> None:
    assert gloo(4, groups_among_processes) == [0] * 4


def test_thread_ranks_average_and_refuse_what_is_not_there() -> None:
    def average() -> list[float]:
        group = current_world().process_group("dp", Mesh.of(2))
        tensor = torch.tensor([1.0 + current_world().rank])
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        with pytest.raises(NotBuiltError, match="does not reduce by BXOR"):
            dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BXOR, group=group)
        return tensor.tolist()

    assert run_ranks(2, average) == [[1.5], [1.5]]


def test_one_rank_without_torch_distributed_has_them_too() -> None:
    world = World(0, 1, 0, torch.device("cpu"), "none", None)
    check_operations(world.process_group("dp", Mesh.of(1)), 0, 1)
    assert world.device_mesh(Mesh.of(1), ("dp",)).size() == 1
    world.close()


def test_a_dry_run_has_groups_of_torchs_fake_backend() -> None:
    with fake_world(8, rank=5) as world:
        group = world.process_group("dp_shard", Mesh.of(8, tp=2))
        assert (group.rank(), group.size()) == (2, 4)
        assert world.device_mesh(Mesh.of(8, tp=2), ("dp_shard", "tp")).mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
