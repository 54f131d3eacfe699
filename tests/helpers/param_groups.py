"""A parameter group that is gathered: its buffer has the values of the parameters, which are views of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.comm.protocol import Communicator
from shoal.sharding.axes import GroupAxes
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.layout import lay_out
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Placement
from shoal.sharding.storage import ShardStorage
from shoal.sharding.table import row_of_stage


def gathered_group(
    parameters: Sequence[nn.Parameter],
    comm: Communicator,
    storage: Callable[[torch.Tensor], ShardStorage] | None,
    *,
    stage: int = 3,
) -> ParameterGroup:
    """``storage``: makes that of the shard from memory of zeros; None: the parameters are stored whole."""
    shapes = [(f"p{number}", tuple(parameter.shape), 0) for number, parameter in enumerate(parameters)]
    layout, row = lay_out(shapes, num_shards=comm.size), row_of_stage(stage, "u")
    buffer = FlatBuffer(
        "u",
        layout,
        torch.float32,
        torch.device("cpu"),
        comm,
        {"dp_shard": comm},
        Placement() if storage is None else row.parameter,
        full=torch.zeros(layout.numel),
        storage=None if storage is None else storage(torch.zeros(layout.shard_numel)),
    )
    buffer.assume(Placement())
    group = ParameterGroup(row, GroupAxes("dp_shard", comm, {"dp_shard": comm}), buffer, parameters)
    for view, parameter in zip(buffer.views, parameters, strict=True):
        view.copy_(parameter.data)
    buffer.write_back()
    group.attach_views()
    return group
