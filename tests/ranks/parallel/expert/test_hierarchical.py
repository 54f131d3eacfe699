"""Rows sent in two steps, along two axes, beside one all-to-all among all ranks."""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.protocol import Communicator
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh, factor_axis
from shoal.parallel.expert.dispatch import TwoStepRows
from shoal.parallel.expert.held import ExpertsHeld
from tests.helpers.expert_dispatch_cases import DispatchCase, Values, train


def two_axes() -> tuple[Communicator, Communicator, Communicator]:
    world, mesh = current_world(), Mesh.of(4)
    local, node = (world.communicator(factor_axis("dp_shard", (2, 2), (at,)), mesh) for at in (1, 0))
    return world.communicator("dp_shard", mesh), local, node


def test_an_all_to_all_in_two_steps_gives_what_one_gives_and_sends_less_between_nodes() -> None:
    counts = [[(3 * source + 2 * target) % 5 for target in range(4)] for source in range(4)]

    def run() -> None:
        comm, local, node = two_axes()
        rank = comm.rank
        rows = [
            torch.arange(counts[source][target] * 3.0).view(-1, 3) + 1000 * source + 100 * target
            for source in range(4)
            for target in range(4)
        ]
        mine, back = torch.cat(rows[4 * rank : 4 * rank + 4]), list(zip(*counts, strict=True))
        with current_world().recorder.recording() as entries:
            received = TwoStepRows(mine, counts, local, node, "rows").wait()
            returned = TwoStepRows(2 * received, back, local, node, "rows back").wait()
        assert torch.equal(received, torch.cat(rows[rank::4]))
        assert torch.equal(returned, 2 * mine)
        beside, across = rank ^ 1, rank ^ 2  # the other rank of the node, the same coordinate of the other node
        received_rows = [
            counts[beside][rank] + counts[beside][across],
            counts[across][rank] + counts[across ^ 1][rank],
            counts[rank][beside] + counts[across][beside],
            counts[rank][across] + counts[rank][across ^ 1],
        ]
        data = [(entry.axis, entry.nbytes) for entry in entries if entry.kind == "data"]
        assert data == [
            (axis.axis, 12 * num) for axis, num in zip((local, node, local, node), received_rows, strict=True)
        ]

    run_ranks(4, run)


def test_experts_over_two_axes_give_what_they_give_over_one() -> None:
    case = DispatchCase()

    def run(case: DispatchCase, held: ExpertsHeld, *given: Any) -> Values:
        held.comm, *axes = two_axes()
        held.hierarchy = axes[0], axes[1]
        with current_world().recorder.recording() as entries:
            values = train(case, held, *given)
        along = [entry.axis for entry in entries if entry.kind == "data"]
        assert along == [axes[0].axis, axes[1].axis] * 4
        return values

    in_two_steps, at_once = case.found(4, run), case.found(4, train)
    assert all(torch.equal(value, in_two_steps[name]) for name, value in at_once.items())
