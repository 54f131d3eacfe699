"""A process group of torch whose name is given.

``torch.distributed.new_group`` either calls all ranks of the world together for every group, or names a group by its
ranks and the number of groups that this process has. Groups that a script made before on some ranks only change that
number, so the ranks of one group would wait for each other under different names until the time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


def named_group(
    store: Store,
    name: str,
    ranks: Sequence[int],
    *,
    backend: str | None = None,
    options: Any = None,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """The group of ``ranks``, in order, of which this rank is one; only they call.

    Args:
        store: of all ranks.
        name: the same on the ranks of the group; of no other group in ``store`` or of this process.
        backend, timeout: None: those of the default group.
        device: that the group is bound to; None: that of the default group.

    Communicates: what the backend does when it starts.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()
    kind = c10d.Backend(backend or dist.get_backend())
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        kind,
        store,
        cast(Any, name),
        backend_options=options,
        timeout=timeout or c10d._get_default_timeout(kind),
        device_id=device or default.bound_device_id,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
