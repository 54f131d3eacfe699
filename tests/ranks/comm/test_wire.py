"""all_gather and reduce_scatter in a wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.wire import Int8Blocks
from shoal.comm.world import World, current_world
from shoal.mesh import Mesh
from tests.helpers.comm_cases import current_dp, data_of
from tests.ranks.comm.test_processes import own_world

Gloo = Callable[..., list[Any]]


class Exact:
    """A format that loses nothing: the values reversed, and their number."""

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.flip(0), torch.tensor([tensor.numel()])

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        assert parts[1].item() == out.numel()
        out.copy_(parts[0].flip(0))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_format_gives_the_bits_of_the_plain_collective(size: int, dtype: torch.dtype) -> None:
    def compare() -> None:
        comm = current_dp()
        for numel in (1, 7, 3001):
            shard = data_of(comm.rank, numel, dtype, 1)
            plain, encoded = torch.empty(numel * size, dtype=dtype), torch.empty(numel * size, dtype=dtype)
            comm.all_gather(plain, shard, label="plain").drain()
            assert comm.all_gather(encoded, shard, label="encoded", wire=Exact()).wait() is encoded
            assert torch.equal(plain, encoded)
            full = data_of(comm.rank, numel * size, dtype, 2)
            for accumulate in (False, True):
                outs = [torch.full((numel,), 3.0) for _ in range(2)]
                comm.reduce_scatter(full, outs[0], scale=0.3, accumulate=accumulate, label="plain").drain()
                work = comm.reduce_scatter(
                    full, outs[1], scale=0.3, accumulate=accumulate, label="encoded", wire=Exact()
                )
                work.drain()
                assert torch.equal(*outs)
            comm.drain()

    run_ranks(size, compare)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wire", [None, Exact()])
def test_a_blocking_call_returns_with_its_result_and_a_source_that_is_free(size: int, wire: Exact | None) -> None:
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
    size, numel, wire = comm.size, 1000, Int8Blocks(block=64)
    shards = [data_of(rank, numel, torch.float32, 3) * 10**rank for rank in range(size)]
    full = torch.empty(numel * size)
    full[comm.rank * numel : (comm.rank + 1) * numel] = shards[comm.rank]
    with world.recorder.recording() as entries:
        comm.all_gather(full, label="weights", wire=wire).wait()
    exact = torch.cat(shards)
    # 1000 integers, padded to 1008 bytes, and 16 scales, of every other rank.
    assert [(entry.op, entry.nbytes) for entry in entries] == [("all_gather", (size - 1) * (1008 + 64))]
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
    assert [(entry.op, entry.nbytes) for entry in entries] == [("all_to_all", (size - 1) * (1008 + 64))]
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


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_int8_blocks_keep_zeros_extremes_and_mark_what_is_not_finite(numel: int) -> None:
    wire = Int8Blocks(block=64)
    values = torch.linspace(-3.0, 5.0, numel)
    out = torch.empty(numel)
    wire.decode(wire.encode(values), out)
    assert (out - values).abs().max() <= 5.0 / 127 / 2 + 1e-6
    assert torch.equal(out[values.abs() == values.abs().max()], values[values.abs() == values.abs().max()])
    wire.decode(wire.encode(torch.zeros(numel)), out)
    assert not out.any()
    for bad in (torch.inf, -torch.inf, torch.nan):
        values[numel // 2] = bad
        wire.decode(wire.encode(values), out)
        assert out[numel // 2].isnan()
