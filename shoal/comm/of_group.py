"""The communicator of a process group of torch, for interfaces that are handed one."""

from __future__ import annotations

import torch.distributed as dist

from shoal.comm.process_group import CommunicatorGroup
from shoal.comm.protocol import Communicator
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh


def communicator_of(group: dist.ProcessGroup | None, axis: str = "sp") -> Communicator:
    """The communicator of the ranks of ``group``; None: of all ranks.

    Args:
        axis: ``sp``, or another basic axis of the mesh, under which its collectives are recorded.

    Raises: UsageError: the ranks are not ``first, first + stride, first + 2 * stride, ...``, or the group's size times
        its stride does not divide the world.
    Communicates: the first time, control messages over the whole world: every rank calls, with its own group.
    """
    if isinstance(group, CommunicatorGroup):
        return group.communicator
    world = current_world()
    ranks = list(range(world.size)) if group is None else dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride > 0 and world.size % (stride * len(ranks)) == 0:
        mesh = Mesh.of(world.size, tp=stride, **{axis: len(ranks)})
        if mesh.ranks_along(axis, world.rank) == tuple(ranks):
            return world.communicator(axis, mesh)
    raise UsageError(
        f"ranks {ranks} of a process group are no group of an axis of a mesh of {world.size} ranks",
        do="make groups of neighbours, or of every n-th rank, that are alike on all ranks.",
        code="process-group-ranks",
    )
