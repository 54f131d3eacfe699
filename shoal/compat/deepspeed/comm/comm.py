"""Collectives as DeepSpeed's scripts call them. Shoal's own collectives do not pass here: see ``shoal.comm``.

The arguments that DeepSpeed adds to torch's for its log (``prof``, ``log_name``, ``debug``) are taken and not used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup, ReduceOp, batch_isend_irecv, is_available
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.comm.world import current_world, init_distributed
from shoal.engine.log import say_on_rank_0
from shoal.text import table

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
]


def _without_log(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, which takes the arguments of DeepSpeed's log too."""

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


all_gather = _without_log(dist.all_gather)
all_gather_into_tensor = allgather_fn = _without_log(dist.all_gather_into_tensor)
all_gather_object = _without_log(dist.all_gather_object)
all_reduce = inference_all_reduce = _without_log(dist.all_reduce)
all_to_all = _without_log(dist.all_to_all)
all_to_all_single = _without_log(dist.all_to_all_single)
barrier = _without_log(dist.barrier)
broadcast = _without_log(dist.broadcast)
broadcast_object_list = _without_log(dist.broadcast_object_list)
gather = _without_log(dist.gather)
irecv = _without_log(dist.irecv)
isend = _without_log(dist.isend)
monitored_barrier = _without_log(dist.monitored_barrier)
recv = _without_log(dist.recv)
reduce = _without_log(dist.reduce)
reduce_scatter = _without_log(dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _without_log(dist.reduce_scatter_tensor)
scatter = _without_log(dist.scatter)
send = _without_log(dist.send)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """One all_reduce of several tensors. Returns: their works, where ``async_op``."""
    works = [dist.all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors]
    return _Works(works) if async_op else None


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """All-gathers, one of each pair. Returns: their works, where ``async_op``."""
    works = [
        dist.all_gather_into_tensor(output, given, group=group, async_op=async_op)
        for output, given in zip(output_tensors, input_tensors, strict=True)
    ]
    return _Works(works) if async_op else None


class _Works:
    """Several works to wait for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def has_all_gather_into_tensor() -> bool:
    return True


has_all_reduce_coalesced = has_coalescing_manager = has_reduce_scatter_tensor = has_all_gather_into_tensor


# who and where


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This rank's number in the group; without a process group, in Shoal's world (0 of 1)."""
    return dist.get_rank(group) if is_initialized() else current_world().rank


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else current_world().size


def get_local_rank() -> int:
    return current_world().local_rank


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def get_world_group() -> Any:
    return dist.group.WORLD


def new_group(ranks: Sequence[int]) -> Any:
    return dist.new_group(list(ranks))


def destroy_process_group(group: Any = None) -> None:
    if is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A torch DeviceMesh. Shoal makes its own meshes from the config: this one is for the script's use."""
    return init_device_mesh(current_world().device.type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """No effect: ``init_distributed`` reads what Open MPI and Slurm say."""


def set_backend() -> None:
    """No effect: torch.distributed is the only one."""


# the log


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Any = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """No effect: Shoal always records its last 1,024 collectives, at no cost worth switching off."""


class _Log:
    """Where each world's log begins."""

    def __init__(self) -> None:
        self.since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_log = _Log()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Print what this rank's engines have issued lately, on rank 0. Returns: the same, with ``return_dict``."""
    world = current_world()
    totals: dict[str, list[int]] = {}
    for entry in world.recorder.last:
        if entry.seq >= _log.since.get(world, 0):
            total = totals.setdefault(f"{entry.op} {entry.axis}", [0, 0])
            total[0] += 1
            total[1] += entry.nbytes
    rows = [[name, count, nbytes] for name, (count, nbytes) in sorted(totals.items())]
    say_on_rank_0(world.rank, "collectives of late:\n" + table(rows, ["collective", "calls", "bytes"]))
    return {name: {"count": count, "bytes": nbytes} for name, count, nbytes in rows} if return_dict else None


def reset_log() -> None:
    """``log_summary`` begins here."""
    world = current_world()
    _log.since[world] = world.recorder.num_issued
