"""A process group of torch whose name is given.

``torch.distributed.new_group`` either calls all ranks of the world together for every group, or names a group by its
ranks and the number of groups that this process has. Groups that a script made before on some ranks only change that
number, so the ranks of one group would wait for each other under different names until the time-out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

_ABORT_SECONDS = 10.0


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


def is_open(group: dist.ProcessGroup) -> bool:
    """False if the script has destroyed the group, alone or with all others."""
    return any(each is group for each in dist.distributed_c10d._world.pg_map)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """End the kernels of all groups; each rank does so for itself.

    Each in a thread of its own: to free one communicator waits for all kernels of the device, those of the others too,
    which end only once theirs is told.

    Order: blocks the host until all have ended, for ten seconds at most.
    """

    def abort(group: dist.ProcessGroup) -> None:
        with suppress(RuntimeError):
            group.abort()

    threads = [Thread(target=abort, args=[group], name="shoal-abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def destroy_groups(groups: Sequence[dist.ProcessGroup], *, has_failed: bool) -> None:
    """Destroy those that the script has not destroyed.

    Args:
        has_failed: a rank has failed. To destroy a group waits for what is under way there, which its peers may never
            join: the groups are aborted first.
    """
    left = [group for group in groups if is_open(group)]
    if has_failed:
        abort_groups(left)
    for group in left:
        with suppress(RuntimeError):
            dist.destroy_process_group(group)
