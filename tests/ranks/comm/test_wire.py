"""all_gather and reduce_scatter in a wire format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.comm.formats import Int4, Int8, OneBit
from shoal.comm.threads import run_ranks
from shoal.comm.two_level import TwoLevels
from shoal.comm.wire import Wire
from shoal.comm.world import World, current_world
from shoal.mesh import Mesh, factor_axis
from tests.helpers.comm_cases import current_dp, data_of
from tests.helpers.exact_format import Exact
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_format_gives_the_bits_of_the_plain_collective(size: int, dtype: torch.dtype) -> None:
    def compare() -> None:
        comm = current_dp()
        for numel in (1, 7, 3001):
            shard = data_of(comm.rank, numel, dtype, 1)
            plain, encoded = torch.empty(numel * size, dtype=dtype), torch.empty(numel * size, dtype=dtype)
            comm.all_gather(plain, shard, label="plain").drain()
            assert comm.all_gather(encoded, shard, label="encoded", wire=Wire(Exact())).wait() is encoded
            assert torch.equal(plain, encoded)
            full = data_of(comm.rank, numel * size, dtype, 2)
            for accumulate in (False, True):
                outs = [torch.full((numel,), 3.0) for _ in range(2)]
                comm.reduce_scatter(full, outs[0], scale=0.3, accumulate=accumulate, label="plain").drain()
                work = comm.reduce_scatter(
                    full, outs[1], scale=0.3, accumulate=accumulate, label="encoded", wire=Wire(Exact())
                )
                work.drain()
                assert torch.equal(*outs)
            comm.drain()

    run_ranks(size, compare)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wire", [None, Wire(Exact())])
def test_a_blocking_call_returns_with_its_result_and_a_source_that_is_free(size: int, wire: Wire | None) -> None:
    def move() -> None:
        comm = current_dp()
        shard, full, out = torch.full((4,), 1.0 + comm.rank), torch.empty(4 * size), torch.empty(4)
        for _ in range(3):
            comm.blocking.all_gather(full, shard, label="gather", wire=wire)
            assert full.tolist() == [1.0 + rank for rank in range(size) for _ in range(4)]
            shard.fill_(7.0)  # no rank reads it any more
            comm.blocking.reduce_scatter(full, out, label="sum", wire=wire)
            assert out.tolist() == [size * (1.0 + comm.rank)] * 4
            full.fill_(7.0)
            shard.fill_(1.0 + comm.rank)
            rows = comm.gathered(shard.view(2, 2), label="rows")
            assert rows.shape == (size, 2, 2)
            assert rows[:, 0, 0].tolist() == [1.0 + rank for rank in range(size)]

    run_ranks(size, move)


def check_int8(world: World) -> None:
    comm = world.communicator("dp", Mesh.of(world.size))
    size, numel, wire = comm.size, 1000, Wire(Int8(block=64))
    shards = [data_of(rank, numel, torch.float32, 3) * 10**rank for rank in range(size)]
    full = torch.empty(numel * size)
    full[comm.rank * numel : (comm.rank + 1) * numel] = shards[comm.rank]
    with world.recorder.recording() as entries:
        comm.all_gather(full, label="weights", wire=wire).wait()
    exact = torch.cat(shards)
    # 1000 integers, in blocks of 64 and a last one of 64, and 16 scales, of every other rank.
    assert [(entry.op, entry.nbytes) for entry in entries] == [("all_gather", (size - 1) * (1024 + 64))]
    for rank, shard in enumerate(shards):
        error = (full - exact)[rank * numel : (rank + 1) * numel].abs().max()
        assert 0 < error <= shard.abs().max() / 127 * 0.51
    # Every rank, the sender included, has the same values.
    everyone = comm.exchange(full, label="compare").wait()
    assert all(torch.equal(row, full) for row in everyone)

    gradients = [data_of(rank, numel * size, torch.bfloat16, 4) for rank in range(size)]
    out = torch.zeros(numel)
    with world.recorder.recording() as entries:
        comm.reduce_scatter(gradients[comm.rank].clone(), out, scale=1 / size, label="gradient", wire=wire).drain()
    assert [(entry.op, entry.nbytes) for entry in entries] == [("all_to_all", (size - 1) * (1024 + 64))]
    own = slice(comm.rank * numel, (comm.rank + 1) * numel)
    mean = sum(gradient.float() for gradient in gradients)[own] / size
    assert (out - mean).abs().max() <= max(gradient.abs().max() for gradient in gradients) / 127 * 0.51
    comm.drain()


def test_int8_blocks_stay_within_half_a_step_among_threads() -> None:
    run_ranks(3, lambda: check_int8(current_world()))


def int8_among_processes(rank: int, size: int, shared_memory: bool) -> None:
    world = own_world(rank, size, "int8", shared_memory)
    check_int8(world)
    world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_int8_blocks_stay_within_half_a_step_among_processes(gloo: Gloo, shared_memory: bool) -> None:
    gloo(2, int8_among_processes, shared_memory)


# All-reduces, differences, errors, and two levels.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_all_reduce_in_an_exact_format_gives_the_bits_of_the_plain_one(size: int) -> None:
    def compare() -> None:
        comm = current_dp()
        plain = data_of(comm.rank, 24 * size, torch.float32, 1)
        encoded = plain.clone()
        comm.all_reduce(plain, scale=0.3, label="plain").drain()
        comm.all_reduce(encoded, scale=0.3, label="encoded", wire=Wire(Exact())).drain()
        assert torch.equal(plain, encoded)

    run_ranks(size, compare)


def test_what_an_all_reduce_loses_is_added_to_the_next_one() -> None:
    """One process does the same: worker errors before the sum, the errors of each range after it."""
    size, numel, num_steps = 3, 96, 4
    form = OneBit(block=32)

    def on_ranks() -> list[torch.Tensor]:
        comm = current_dp()
        error, second = torch.zeros(numel), torch.zeros(numel // size)
        wire, results = Wire(form, error=error, second_error=second), []
        for step in range(num_steps):
            full = data_of(comm.rank, numel, torch.float32, step)
            comm.all_reduce(full, scale=1 / size, label="momentum", wire=wire).drain()
            results.append(full)
        return results

    errors, seconds = torch.zeros(size, numel), torch.zeros(size, numel // size)
    for step, found in enumerate(zip(*run_ranks(size, on_ranks), strict=True)):
        sent = torch.empty(size, size, numel // size)
        for rank in range(size):
            rows = data_of(rank, numel, torch.float32, step).view(size, -1)
            form.decode(form.encode(rows, errors[rank].view(size, -1)), sent[rank])
        mean = (((sent[0] + sent[1]) + sent[2]) * (1 / size)).contiguous()
        wanted = torch.empty_like(mean)
        for rank in range(size):
            form.decode(form.encode(mean[rank : rank + 1], seconds[rank : rank + 1]), wanted[rank : rank + 1])
        for values in found:
            assert torch.equal(values, wanted.flatten())


def test_differences_keep_all_copies_equal_and_close_to_what_was_sent() -> None:
    def gather() -> tuple[list[torch.Tensor], list[float]]:
        comm = current_dp()
        full = torch.cat([data_of(rank, 500, torch.float32, 0) for rank in range(comm.size)])
        copies, lost = [], []
        for step in range(4):
            shards = [data_of(rank, 500, torch.float32, 0) + 0.01 * step for rank in range(comm.size)]
            base = full.view(comm.size, -1)[comm.rank].clone()
            comm.all_gather(full, shards[comm.rank], label="weights", wire=Wire(Int4(), base=base)).drain()
            copies.append(full.clone())
            lost.append(float((full - torch.cat(shards)).abs().max()))
        return copies, lost

    results = run_ranks(2, gather)
    for copies in zip(*(copies for copies, _ in results), strict=True):
        assert torch.equal(*copies)
    for _, lost in results:
        assert max(lost) <= 0.011 / 7 * 0.51  # of the change, not of the values, and it does not add up


def levels(world: World, width: int, *, is_gather_split: bool = False) -> TwoLevels:
    """The ranks in nodes of ``width``."""
    mesh = Mesh.of(world.size)
    sizes = (world.size // width, width)
    inside, between = (world.communicator(factor_axis("fsdp", sizes, (at,)), mesh) for at in (1, 0))
    return TwoLevels(world.communicator("fsdp", mesh), inside, between, is_gather_split=is_gather_split)


@pytest.mark.parametrize("is_gather_split", [False, True])
@pytest.mark.parametrize("between", [None, Exact()])
def test_two_levels_in_exact_formats_give_the_bits_of_one(between: Exact | None, is_gather_split: bool) -> None:
    def compare() -> None:
        axis = levels(current_world(), 2, is_gather_split=is_gather_split)
        comm, numel = axis.comm, 40
        wire = Wire(Exact(), between=between)
        shard = data_of(comm.rank, numel, torch.float32, 1)
        plain, split = torch.empty(numel * comm.size), torch.empty(numel * comm.size)
        comm.all_gather(plain, shard, label="plain").drain()
        for each in (wire, None):
            split.fill_(torch.nan)
            axis.all_gather(split, shard, label="split", wire=each).drain()
            assert torch.equal(plain, split)
        full = torch.randint(-9, 9, (numel * comm.size,), generator=torch.Generator().manual_seed(comm.rank)).float()
        outs = [torch.full((numel,), 3.0) for _ in range(2)]
        comm.reduce_scatter(full.clone(), outs[0], scale=0.5, accumulate=True, label="plain").drain()
        axis.reduce_scatter(full.clone(), outs[1], scale=0.5, accumulate=True, label="split", wire=wire).drain()
        assert torch.equal(*outs)  # sums of integers, which no order changes
        totals = [full.clone(), full.clone()]
        comm.all_reduce(totals[0], scale=0.5, label="plain").drain()
        axis.all_reduce(totals[1], scale=0.5, label="split", wire=wire).drain()
        assert torch.equal(*totals)

    run_ranks(4, compare)


def test_between_nodes_another_format_is_sent_and_fewer_bytes() -> None:
    numel = 512

    def record() -> list[tuple[str, str, int]]:
        world = current_world()
        axis = levels(world, 2, is_gather_split=True)
        wire = Wire(Int8(), between=Int4())
        full, out = torch.randn(numel * 4), torch.empty(numel)
        with world.recorder.recording() as entries:
            axis.reduce_scatter(full, out, label="gradient", wire=wire).drain()
            axis.all_gather(full, out, label="weights", wire=wire).drain()
        return [(entry.op, entry.axis, entry.nbytes) for entry in entries]

    int8, int4 = numel + 4 * 2, numel // 2 + 4 * 2
    int8_message = -(-int8 // 16) * 16
    inside, between = (factor_axis("fsdp", (2, 2), (at,)) for at in (1, 0))
    for entries in run_ranks(4, record):
        assert entries == [
            ("all_to_all", inside, 2 * int8),  # for the other place of the node, the ranges of two nodes
            ("all_to_all", between, -(-int4 // 16) * 16),
            ("all_gather", between, int8_message),
            ("all_gather", inside, int8_message),
            ("all_gather", inside, int8_message),
        ]


def test_an_error_of_two_levels_lies_in_the_order_of_the_buffer() -> None:
    def feed_back() -> None:
        axis = levels(current_world(), 2)
        full, out = torch.randn(4 * 64, generator=torch.Generator().manual_seed(axis.rank)), torch.empty(64)
        error = torch.zeros_like(full)
        axis.reduce_scatter(
            full, out, label="gradient", wire=Wire(Int4(block=32), between=Exact(), error=error)
        ).drain()
        sent = torch.empty(4, 64)
        Int4(block=32).decode(Int4(block=32).encode(full.view(4, 64)), sent)
        assert torch.equal(error, full - sent.flatten())

    run_ranks(4, feed_back)


def test_an_error_that_decays_is_a_running_mean() -> None:
    rows, error = torch.randn(1, 64), torch.full((1, 64), 0.5)
    lost = error.clone()
    Int4().encode(rows, lost)
    Wire(Int4(), error=error.view(-1), error_decay=0.8).encode(
        rows, lambda numel, dtype, device: torch.empty(numel, dtype=dtype)
    )
    assert torch.allclose(error, 0.8 * 0.5 + 0.2 * lost)
