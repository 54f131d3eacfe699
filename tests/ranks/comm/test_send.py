"""Sends, receives and all_to_all, on every backend that runs on a CPU, and the records of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.comm.protocol import Communicator, Message
from shoal.comm.threads import run_ranks
from shoal.comm.world import World, current_world, fake_world
from shoal.errors import CommError, UsageError
from shoal.mesh import Mesh, tied_axis
from tests.helpers.comm_cases import DTYPES, current_dp, data_of
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]


def parts_of(rank: int, size: int, seed: int) -> list[int]:
    """How many elements ``rank`` sends to each rank; 0 for some."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (
        torch.randint(0, 2, (size,), generator=generator) * torch.randint(1, 3000, (size,), generator=generator)
    ).tolist()


def check_all_to_all(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    for seed, dtype in enumerate((*DTYPES, torch.int64)):
        for numel in (1, 3000):
            source = data_of(rank, numel * size, dtype, seed)
            out = torch.empty_like(source)
            assert comm.all_to_all(out, source, label="equal").wait() is out
            expected = [
                data_of(peer, numel * size, dtype, seed)[numel * rank : numel * (rank + 1)] for peer in range(size)
            ]
            assert torch.equal(out, torch.cat(expected))
        counts = [parts_of(peer, size, seed) for peer in range(size)]
        source = data_of(rank, sum(counts[rank]), dtype, seed)
        out_splits = [counts[peer][rank] for peer in range(size)]
        out = torch.empty(sum(out_splits), dtype=dtype)
        comm.all_to_all(out, source, out_splits=out_splits, source_splits=counts[rank], label="uneven").wait()
        expected = [data_of(peer, sum(counts[peer]), dtype, seed).split(counts[peer])[rank] for peer in range(size)]
        assert torch.equal(out, torch.cat(expected))
    comm.drain()


def check_sends(comm: Communicator) -> None:
    """Rings in both directions, many messages in flight, among collectives that come in another order to each pair."""
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for numel in (1, 5000):
        for target, source in ((following, previous), (previous, following)):
            received = torch.empty(numel)
            message = data_of(rank, numel, torch.float32, 7)
            works = [comm.recv(received, source, label="ring"), comm.send(message, target, label="ring")]
            assert works[0].wait() is received
            assert torch.equal(received, data_of(source, numel, torch.float32, 7))
            for work in works:
                work.drain()
    # More messages than there are slots in shared memory; sent before the first one is received.
    messages = [torch.full((3,), float(100 * rank + index)) for index in range(50)]
    sends = [comm.send(message, following, label=f"message {index}") for index, message in enumerate(messages)]
    comm.barrier(label="between")
    for index in range(50):
        received = torch.empty(3)
        comm.recv(received, previous, label=f"message {index}").wait()
        assert received.tolist() == [100.0 * previous + index] * 3
    for send in sends:
        send.drain()
    comm.barrier(label="end")
    # A source may be overwritten after drain().
    if rank == 0:
        tensor = torch.ones(1000)
        for index in range(1, size):
            comm.send(tensor.fill_(index), index, label="reused").drain()
    else:
        assert comm.recv(torch.empty(1000), 0, label="reused").wait().tolist() == [float(rank)] * 1000
    comm.barrier(label="done")
    comm.drain()


def check_batches(comm: Communicator) -> None:
    """Rings in both directions at once; a batch that a peer answers with calls of their own; several to one peer."""
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for numel in (1, 5000):
        mine, up, down = (torch.full((numel,), float(value)) for value in (rank + 1, 0, 0))
        work = comm.batch(
            [
                Message("recv", up, previous, "up"),
                Message("send", mine, following, "up"),
                Message("send", mine, previous, "down"),
                Message("recv", down, following, "down"),
            ]
        )
        assert work.wait() is down
        assert set(up.tolist()) == {previous + 1.0} and set(down.tolist()) == {following + 1.0}
        work.drain()
        mine.fill_(-1.0)
    if rank == 0:
        answer = torch.empty(2)
        messages = [Message("send", torch.full((3,), value), 1, f"part {value:g}") for value in (1.0, 2.0)]
        assert comm.batch([*messages, Message("recv", answer, 1, "sum")]).wait().tolist() == [3.0, 3.0]
    elif rank == 1:
        first, second = torch.empty(3), torch.empty(3)
        comm.recv(first, 0, label="part 1").wait()
        assert comm.batch([Message("recv", second, 0, "part 2")]).wait() is second
        comm.send((first + second)[:2], 0, label="sum").drain()
    comm.barrier(label="batches")
    comm.drain()


def check_all(comm: Communicator) -> None:
    check_all_to_all(comm)
    check_sends(comm)
    check_batches(comm)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sends_and_all_to_all_among_threads(size: int) -> None:
    run_ranks(size, lambda: check_all(current_dp()))


def all_sends(rank: int, size: int, shared_memory: bool) -> None:
    world = own_world(rank, size, "sends", shared_memory)
    check_all(world.communicator("dp", Mesh.of(size)))
    world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_sends_and_all_to_all_among_processes(gloo: Gloo, shared_memory: bool) -> None:
    gloo(3, all_sends, shared_memory)


def tied_sums(rank: int, size: int, shared_memory: bool) -> float:
    """Stages 0 and 2 of three share a weight; stage 1 opens the axis with them, alone."""
    world = own_world(rank, size, "tied", shared_memory)
    comm = world.communicator(tied_axis([0, 2]), Mesh(pp=3))
    total = comm.all_reduce(torch.tensor([1.0 + rank]), label="tied").wait().item()
    world.close()
    return total


@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_outside_a_tied_axis_are_alone_on_it(gloo: Gloo, shared_memory: bool) -> None:
    assert gloo(3, tied_sums, shared_memory) == [4.0, 2.0, 4.0]


def mismatch(rank: int, size: int, shared_memory: bool, kind: str) -> str:
    world = own_world(rank, size, f"mismatch {kind}", shared_memory)
    comm = world.communicator("dp", Mesh.of(size))
    text = "no error"
    try:
        if kind == "splits":
            splits = [3, 2] if rank == 0 else [3, 3]
            comm.all_to_all(
                torch.empty(6), torch.ones(sum(splits)), out_splits=[3, 3], source_splits=splits, label="uneven"
            ).wait()
        elif kind == "batch":  # what rank 1 receives has another label
            label, back = ("other", "back") if rank == 0 else ("activation", "back")
            sent, received = (label, back) if rank == 0 else (back, label)
            messages = [
                Message("send", torch.ones(5), 1 - rank, sent),
                Message("recv", torch.empty(5), 1 - rank, received),
            ]
            comm.batch(messages).wait()
        elif rank == 0:
            comm.send(torch.ones(5), 1, label="other" if kind == "label" else "activation")
        else:
            comm.recv(torch.empty(4 if kind == "numel" else 5), 0, label="activation").wait()
    except CommError as error:
        text = str(error)
    torch.distributed.barrier()
    world.close()
    return text


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("label", ["rank 1 on the axis issued send 'activation' of 5 x float32", "rank 0 issued send 'other'"]),
        ("batch", ["rank 1 on the axis issued send 'activation' of 5 x float32", "rank 0 issued send 'other'"]),
        ("numel", ["send 'activation' of 4 x float32", "rank 0 issued send 'activation' of 5 x float32"]),
        ("splits", ["rank 0 sends 2 elements to rank 1, which expects 3"]),
    ],
)
def test_a_receive_that_does_not_fit_its_send_names_both(
    gloo: Gloo, shared_memory: bool, kind: str, said: list[str]
) -> None:
    text = gloo(2, mismatch, shared_memory, kind)[1]
    for words in said:
        assert words in text.replace("\n", " ")


def test_sends_and_receives_are_recorded_with_the_bytes_received() -> None:
    def exchange() -> list[tuple[str, str, int]]:
        comm = current_dp()
        peer = 1 - comm.rank
        with current_world().recorder.recording() as entries:
            comm.send(torch.ones(5), peer, label="there")
            comm.recv(torch.ones(5), peer, label="there").wait()
            messages = Message("recv", torch.ones(3), peer, "batched"), Message("send", torch.ones(3), peer, "batched")
            comm.batch(messages).wait()
            comm.all_to_all(torch.ones(6), torch.ones(6), label="equal").wait()
            comm.all_to_all(
                torch.ones(4), torch.ones(4), out_splits=[2, 2], source_splits=[2, 2], label="uneven"
            ).wait()
        return [(entry.op, entry.label, entry.nbytes) for entry in entries]

    expected = [
        ("send", "there", 0),
        ("recv", "there", 20),
        ("send", "batched", 0),
        ("recv", "batched", 12),
        ("all_to_all", "equal", 12),
        ("all_to_all", "uneven", 8),
    ]
    assert run_ranks(2, exchange) == [expected] * 2


def test_one_rank_and_a_dry_run_have_them_too() -> None:
    comm = World(0, 1, 0, torch.device("cpu"), "none", None).communicator("dp", Mesh.of(1))
    out = torch.empty(3)
    assert comm.all_to_all(out, torch.tensor([1.0, 2.0, 3.0]), label="alone").wait().tolist() == [1.0, 2.0, 3.0]
    with fake_world(4, rank=1) as world:
        comm = world.communicator("dp", Mesh.of(4))
        source = torch.arange(8.0)
        assert comm.all_to_all(torch.empty(8), source, label="dry").wait().tolist() == [0, 0, 2, 3, 0, 0, 0, 0]
        assert comm.recv(torch.empty(2), 0, label="dry").wait().tolist() == [0.0, 0.0]
        assert comm.send(source, 2, label="dry").wait() is source
        messages = [Message("send", source, 2, "dry"), Message("recv", torch.ones(2), 0, "dry")]
        assert comm.batch(messages).wait().tolist() == [0.0, 0.0]


def test_bad_peers_and_split_sizes_are_refused() -> None:
    def bad() -> None:
        comm = current_dp()
        for peer in (comm.rank, 2, -1):
            with pytest.raises(UsageError, match=f"names peer {peer}"):
                comm.send(torch.ones(1), peer, label="x")
            messages = Message("send", torch.ones(1), 1 - comm.rank, "x"), Message("recv", torch.ones(1), peer, "y")
            with pytest.raises(UsageError, match=f"recv 'y': .* names peer {peer}"):
                comm.batch(messages)
        with pytest.raises(UsageError, match="only one of out_splits and source_splits"):
            comm.all_to_all(torch.ones(2), torch.ones(2), out_splits=[1, 1], label="x")
        with pytest.raises(UsageError, match=r"split sizes \[1, 2\] for a tensor of 2 elements"):
            comm.all_to_all(torch.ones(2), torch.ones(2), out_splits=[1, 2], source_splits=[1, 1], label="x")
        with pytest.raises(UsageError, match="pad the full tensor"):
            comm.all_to_all(torch.ones(3), torch.ones(3), label="x")

    run_ranks(2, bad)


def test_a_send_waits_for_nobody_and_its_drain_for_the_receiver() -> None:
    may_receive = threading.Event()
    drained: list[bool] = []

    def run() -> None:
        comm = current_dp()
        if comm.rank == 0:
            send = comm.send(torch.ones(4), 1, label="early")
            send.wait()
            may_receive.set()
            send.drain()
            drained.append(True)
        else:
            assert may_receive.wait(10)
            assert not drained
            assert comm.recv(torch.empty(4), 0, label="early").wait().tolist() == [1.0] * 4

    run_ranks(2, run)
    assert drained == [True]


def test_the_drain_of_a_small_exchange_waits_for_nobody_who_reads() -> None:
    may_wait = threading.Event()

    def run() -> None:
        comm = current_dp()
        if comm.rank == 0:
            exchange = comm.exchange(torch.ones(4), label="early")
            assert exchange.wait().shape == (2, 4)
            exchange.drain()
            comm.drain()
            may_wait.set()
        else:
            exchange = comm.exchange(torch.ones(4), label="early")
            assert may_wait.wait(10)
            exchange.wait()

    run_ranks(2, run)
