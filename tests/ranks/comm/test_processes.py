"""Collectives among real processes: over shared memory, and over Gloo's direct exchange."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm import nccl
from shoal.comm.direct import DirectCommunicator
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.nccl import ComparedCommunicator
from shoal.comm.torch_dist import ProcessTransport
from shoal.comm.world import World, current_world, init_distributed, use_world
from shoal.errors import CommError
from shoal.host_heap import trim
from shoal.mesh import Mesh
from tests.helpers.comm_cases import check_all, check_any_order, check_two_axes, current_dp

Gloo = Callable[..., list[Any]]
CPU = torch.device("cpu")


def own_world(rank: int, size: int, name: str, shared_memory: bool) -> World:
    """A world of this test's own, beside the one that the process keeps."""
    store = PrefixStore(f"test/{name}/{shared_memory}", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, CPU, 30.0, shared_memory=shared_memory)
    return World(rank, size, rank, CPU, "gloo", transport)


def inner_of(comm: Any) -> Any:
    return comm.backend


def all_collectives(rank: int, size: int, shared_memory: bool) -> str:
    world = own_world(rank, size, "all", shared_memory)
    with use_world(world):
        comm = current_dp()
        check_all(comm)
        check_any_order(comm)
        kind = type(inner_of(comm)).__name__
    world.close()
    return kind


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("shared_memory", "kind"), [(True, "DirectCommunicator"), (False, "GlooCommunicator")])
def test_every_collective_is_bit_equal_to_the_plain_formula(
    gloo: Gloo, size: int, shared_memory: bool, kind: str
) -> None:
    assert gloo(size, all_collectives, shared_memory) == [kind] * size


def opposite_orders(rank: int, size: int, shared_memory: bool) -> None:
    world = own_world(rank, size, "axes", shared_memory)
    check_two_axes(world)
    world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_two_axes_may_be_waited_for_in_opposite_orders(gloo: Gloo, shared_memory: bool) -> None:
    gloo(4, opposite_orders, shared_memory)


def adopt(rank: int, size: int) -> list[Any]:
    world = current_world()
    assert init_distributed() is world
    comm = current_dp()
    total = comm.all_reduce(torch.tensor([1.0 + rank]), label="ranks").wait()
    return [
        world.rank,
        world.size,
        world.local_rank,
        world.backend,
        isinstance(inner_of(comm), DirectCommunicator),
        total.item(),
    ]


def test_an_existing_process_group_is_used(gloo: Gloo) -> None:
    assert gloo(2, adopt) == [[0, 2, 0, "gloo", True, 3.0], [1, 2, 1, "gloo", True, 3.0]]


def fall_back(rank: int, size: int) -> list[bool]:
    """Rank 1 cannot be reached in /proc, as if it ran in another container."""
    store = PrefixStore("test/fall-back", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, CPU, 30.0)
    if rank == 1:
        local_peers = transport._local_peers
        assert local_peers is not None
        store.set("shm/process/1", store.get("shm/process/1").decode().replace(f'"pid": {os.getpid()}', '"pid": 1'))
    world = World(rank, size, rank, CPU, "gloo", transport)
    dist.barrier()
    mesh = Mesh.of(size)
    comm = world.communicator("dp", mesh)
    is_gloo = isinstance(inner_of(comm), GlooCommunicator)
    total = comm.all_reduce(torch.tensor([1.0]), label="sum").wait()
    world.close()
    return [is_gloo, total.item() == 3.0]


def test_where_one_rank_cannot_map_another_all_ranks_take_gloo(gloo: Gloo) -> None:
    assert gloo(3, fall_back) == [[True, True]] * 3


def sockets() -> set[str]:
    names = {os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2] for fd in os.listdir("/proc/self/fd")}
    return {name for name in names if name.startswith("socket:")}


def open_axes(rank: int, size: int) -> int:
    """How many sockets the axes of a mesh took."""
    gc.collect()  # worlds that earlier tests have closed
    dist.barrier()
    before = sockets()  # some of those worlds may be closed only later
    world = own_world(rank, size, "sockets", False)
    mesh = Mesh.of(size, tp=2)
    for axis in ("tp", "dp", "world", "fsdp", "dp"):
        comm = world.communicator(axis, mesh)
        ranks = torch.tensor([float(world.rank)])
        assert comm.all_reduce(ranks, label="ranks").wait().item() == sum(mesh.ranks_along(axis, world.rank))
    taken = len(sockets() - before)
    dist.barrier()  # a rank that closes its connections closes those of others
    world.close()
    return taken


def test_all_axes_together_take_a_socket_for_each_other_rank(gloo: Gloo) -> None:
    assert gloo(4, open_axes) == [1 + 3] * 4  # one listens


def exchange_only(rank: int, size: int) -> list[int]:
    """How many sockets an axis took that exchanges a few numbers, and once it has been used for more."""
    gc.collect()
    dist.barrier()
    before = sockets()
    world = own_world(rank, size, "exchange", False)
    comm = world.communicator("world", Mesh.of(size), max_ctas=1)
    for numel in (1, 1000):  # in the order of the ranks, from those that are not connected too
        rows = comm.exchange(torch.full((numel,), float(rank)), label=f"{numel}").wait()
        assert rows.equal(torch.arange(float(size)).repeat_interleave(numel).view(size, numel))
    assert comm.gather_objects({"rank": rank}, label="objects") == [{"rank": other} for other in range(size)]
    for source in (0, size - 2):
        value = torch.full((1000,), float(rank))
        work = comm.broadcast(value, source, label="value")
        assert work.wait().eq(source).all()
        if rank == source:
            work.drain()
        value.fill_(-1.0)  # it has been passed on
    taken = [len(sockets() - before)]
    dist.barrier()  # no rank connects to more, or closes its connections, before all have counted
    assert comm.all_reduce(torch.tensor([float(rank)]), label="ranks").wait().item() == size * (size - 1) / 2
    taken.append(len(sockets() - before))
    dist.barrier()
    world.close()
    return taken


def test_an_axis_that_exchanges_a_few_numbers_connects_ranks_1_2_4_places_apart(gloo: Gloo) -> None:
    assert gloo(9, exchange_only) == [[1 + 6, 1 + 8]] * 9  # one listens


@contextmanager
def text_of_error(world: World) -> Iterator[list[str]]:
    """The text of the error of communication in the block, or "no error"; then the world is closed."""
    texts: list[str] = []
    try:
        yield texts
    except CommError as error:
        texts.append(str(error))
    finally:
        dist.barrier()
        world.close()
    texts.append("no error")


def disagree(rank: int, size: int, shared_memory: bool, kind: str) -> str:
    world = own_world(rank, size, f"disagree {kind}", shared_memory)
    comm = world.communicator("dp", Mesh.of(size))
    comm.barrier(label="start")
    tensor = torch.ones(8)
    work: Any
    if rank == 0:
        work = comm.all_reduce(tensor, label="same")
    elif kind == "label":
        work = comm.all_reduce(tensor, label="other")
    elif kind == "numel":
        work = comm.all_reduce(tensor[:6], label="same")
    else:
        work = comm.all_gather(tensor, label="same")
    with text_of_error(world) as texts:
        work.wait()
    return texts[0]


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("label", "all_reduce 'other' of 8 x float32"),
        ("numel", "all_reduce 'same' of 6 x float32"),
        ("op", "all_gather 'same' of 8 x float32"),
    ],
)
def test_ranks_that_issue_different_calls_get_both_names(
    gloo: Gloo, shared_memory: bool, kind: str, named: str
) -> None:
    for text in gloo(2, disagree, shared_memory, kind):
        assert "the ranks of axis 'dp' disagree" in text
        assert "all_reduce 'same' of 8 x float32" in text
        assert named in text


def disagree_compared(rank: int, size: int, kind: str) -> str:
    world = own_world(rank, size, f"compared {kind}", False)
    comm = ComparedCommunicator(world.communicator("dp", Mesh.of(size)))
    tensor = torch.ones(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "is_in_host_memory", lambda tensor: False)  # as if Gloo were NCCL's companion
        with text_of_error(world) as texts:
            comm.all_reduce(tensor, label="alike").wait()
            if kind == "message" and rank == 0:
                comm.send(tensor, 1, label="a")
            elif kind == "message" and rank == 1:
                comm.recv(tensor, 0, label="b").wait()
            elif kind == "call":
                comm.all_reduce(tensor[: 4 if rank == 2 else 6], label="same")
    return texts[0]


def test_calls_are_compared_before_they_begin_by_a_companion_over_gloo(gloo: Gloo) -> None:
    for text in gloo(3, disagree_compared, "call"):
        assert "about call 1: ranks 0 and 1 on the axis issued all_reduce 'same' of 6 x float32, rank 2 issued" in text
        assert "all_reduce 'same' of 4 x float32" in text
    first, second, third = gloo(3, disagree_compared, "message")
    assert first == third == "no error" and "rank 1 on the axis issued send 'b' of 6 x float32, rank 0 issued" in second


def resources() -> tuple[int, int, int]:
    """Open files, maps and resident bytes of this process, without what its heap has free."""
    gc.collect()
    trim()
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as statm:
        return len(os.listdir("/proc/self/fd")), len(maps.readlines()), int(statm.read().split()[1]) * 4096


def many_calls_and_worlds(rank: int, size: int, shared_memory: bool) -> list[int]:
    def calls(world: World, number: int) -> None:
        comm = world.communicator("dp", Mesh.of(size))
        held = comm.empty(40_000, torch.float32, CPU).fill_(1.0)
        for index in range(number):
            comm.all_reduce(torch.ones(30_000), label=f"{index}").wait()
            comm.reduce_scatter(held, torch.empty(40_000 // size), label="held").wait()
        comm.drain()

    def one_world(name: str, number: int) -> None:
        world = own_world(rank, size, name, shared_memory)
        calls(world, number)
        world.close()

    one_world("warm", 100)
    one_world("warm again", 100)
    grown = []
    for part in range(4):  # what leaks grows each time; what is kept for the next use, once
        before = resources()
        one_world(f"long {part}", 200)
        for index in range(8):
            one_world(f"short {part} {index}", 2)
        dist.barrier()
        grown.append([after - was for was, after in zip(before, resources(), strict=True)])
    return [min(each) for each in zip(*grown, strict=True)]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_thousand_calls_and_twenty_worlds_leave_nothing(gloo: Gloo, shared_memory: bool) -> None:
    for files, maps, resident in gloo(2, many_calls_and_worlds, shared_memory):
        assert files <= 0
        assert maps <= 2
        assert resident < 8 << 20  # if each call left one of its tensors: 24 MB


def fork_and_end(rank: int, size: int) -> list[float]:
    """A child that is forked while the world stands, and ends in good order."""
    comm = current_dp()
    comm.barrier(label="before")
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(pid, 0)
    total = comm.all_reduce(torch.ones(1), label="after").wait().item()
    return [total, float(any(inner_of(comm)._group.has_left(peer) for peer in range(size)))]


def test_a_forked_child_that_ends_leaves_its_parents_world_alone(gloo: Gloo) -> None:
    assert gloo(2, fork_and_end) == [[2.0, 0.0], [2.0, 0.0]]
