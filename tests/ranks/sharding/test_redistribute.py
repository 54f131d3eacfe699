"""``FlatBuffer.redistribute`` over several axes, and in a wire format."""

from __future__ import annotations

import torch

from shoal.comm.formats import Int8
from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.wire import Wire
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.layout import lay_out
from shoal.sharding.placement import PARTIAL, SHARD, Placement
from shoal.sharding.storage import DeviceStorage


def buffer_of(
    label: str,
    comm: Communicator,
    axes: dict[str, Communicator],
    stored: Placement,
    full: torch.Tensor,
    shard: torch.Tensor | None = None,
) -> FlatBuffer:
    layout = lay_out([("w", tuple(full.shape), 0)], num_shards=comm.size)
    storage = None if shard is None else DeviceStorage(shard)
    return FlatBuffer(label, layout, full.dtype, full.device, comm, axes, stored, full=full, storage=storage)


def test_summands_over_two_axes_are_summed_in_place() -> None:
    def job() -> None:
        world = current_world()
        mesh = Mesh.of(4, tp=2)
        axes = {axis: world.communicator(axis, mesh) for axis in ("dp_shard", "tp")}
        for number in range(20):  # a rank that overwrites what a peer reads would show in some
            full = torch.full((4096,), float(10**world.rank + number))
            source = Placement.of(dp_shard=PARTIAL, tp=PARTIAL)
            buffer_of("b", axes["dp_shard"], axes, source, full).redistribute(Placement(), scale=0.5).drain()
            assert torch.equal(full, torch.full((4096,), 0.5 * (1111 + 4 * number)))

    run_ranks(4, job)


def test_a_move_sends_what_its_wire_format_encodes() -> None:
    def job() -> None:
        world = current_world()
        comm = world.communicator("dp", Mesh.of(2))
        values = torch.randn(2048, generator=torch.Generator().manual_seed(0))
        sharded, whole = Placement.of(dp_shard=SHARD), Placement()
        shard = values[1024 * comm.rank : 1024 * (comm.rank + 1)].clone()
        buffer = buffer_of("b", comm, {"dp_shard": comm}, sharded, torch.empty(2048), shard)
        with world.recorder.recording() as records:
            buffer.redistribute(whole, wire={"dp_shard": Wire(Int8())}).wait()
        assert [(entry.op, entry.nbytes) for entry in records] == [("all_gather", 1024 + 4 * 4)]
        scales = values.view(-1, 256).abs().amax(1, keepdim=True) / 127
        assert ((buffer.full - values).view(-1, 256).abs() <= scales / 2 + 1e-7).all()
        gradient = buffer_of("g", comm, {"dp_shard": comm}, Placement.of(dp_shard=PARTIAL), values.clone())
        result = torch.empty(1024)
        gradient.redistribute(sharded, into=result, wire={"dp_shard": Wire(Int8())}).drain()
        expected = 2 * values[1024 * comm.rank : 1024 * (comm.rank + 1)]
        torch.testing.assert_close(result, expected, rtol=0, atol=0.05)

    run_ranks(2, job)
