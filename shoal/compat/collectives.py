"""``deepspeed.comm`` and ``deepspeed.utils.comms_logging``: collectives as scripts call them, and their log.

Shoal's own collectives do not pass here (see ``shoal.comm``); both are in one log.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.comm.world import current_world
from shoal.device import Device
from shoal.engine.log import say_on_rank_0
from shoal.mesh import Mesh
from shoal.observe.collectives import (
    bandwidths,
    collective_log,
    current_log,
    straggler_table,
    stragglers,
    timed,
)
from shoal.text import format_bytes


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function with the arguments of DeepSpeed's log too; timed where the log records it.

    Order: the host waits for a timed collective; not for sends and receives, whose peer may call later.
    """
    kind = function.__name__
    can_wait = kind not in ("isend", "irecv")

    def finish(work: Any) -> None:
        if can_wait and isinstance(work, dist.Work):
            work.wait()

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **kwargs: Any) -> Any:
        log = current_log()
        if log is None or not log.is_on or not (prof or log.wants(kind, log_name)):
            return function(*args, **kwargs)
        device = Device(current_world().device)
        work, milliseconds = timed(device, lambda: function(*args, **kwargs), finish)
        group = kwargs.get("group")
        size = dist.get_world_size(group if isinstance(group, ProcessGroup) else None)
        nbytes = _nbytes(kind, args, kwargs)
        caller = sys._getframe(1).f_code.co_name
        log.add(kind, nbytes, milliseconds, size=size, name=log_name, caller=caller)
        return work

    return call


def _nbytes(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The bytes of one rank's input: of the arguments, the smallest tensor, or list of tensors."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor | list | tuple)]
    sizes = []
    for value in given:
        tensors = [value] if isinstance(value, torch.Tensor) else value
        if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            sizes.append(sum(tensor.nbytes for tensor in tensors))
    return min(sizes, default=0)


# torch's functions that the log times.
_TIMED = (
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast"
    " broadcast_object_list gather irecv isend monitored_barrier recv reduce reduce_scatter reduce_scatter_tensor"
    " scatter send"
)
TIMED = {name: _logged(getattr(dist, name)) for name in _TIMED.split()}
globals().update(TIMED)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """One all_reduce of several tensors. Returns: their works, where ``async_op``."""
    works = [TIMED["all_reduce"](tensor, op=op, group=group, async_op=async_op) for tensor in tensors]
    return _Works(works) if async_op else None


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """All-gathers, one of each pair. Returns: their works, where ``async_op``."""
    works = [
        TIMED["all_gather_into_tensor"](output, given, group=group, async_op=async_op)
        for output, given in zip(output_tensors, input_tensors, strict=True)
    ]
    return _Works(works) if async_op else None


class _Works:
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def has_all_gather_into_tensor() -> bool:
    return True


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
    """No effect: ``init_distributed`` reads the variables of Open MPI and Slurm."""


def set_backend() -> None:
    """No effect: torch.distributed is the only one."""


# the log


def get_caller_func(frame: int = 3) -> str:
    """The name of the function ``frame`` calls up."""
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    """Bytes in powers of 1,024."""
    return format_bytes(size_bytes)


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Gbit/s of a collective of all ranks, and of its bus, by bytes of one rank and milliseconds."""
    return bandwidths(comm_op, size, duration, current_world().size)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the log of collectives; None: do not change the setting.

    An engine times its own collectives if the log is on when the engine is made: by then, or by the section
    ``comms_logger`` of its config.
    """
    log = collective_log(current_world())
    if deepspeed_config is not None:
        section = getattr(deepspeed_config, "comms_logger", deepspeed_config)
        configure(None, section.enabled, section.prof_all, section.prof_ops, section.verbose, section.debug)
    given = {"is_on": enabled, "takes_all": prof_all, "kinds": prof_ops, "is_verbose": verbose, "names_callers": debug}
    for name, value in given.items():
        if value is not None:
            setattr(log, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the times of collectives on rank 0.

    Returns: with ``return_dict``, the figures by kind and bytes, on each rank its own.
    Communicates: two barriers; with ``show_straggler`` every rank's times. Every rank calls.
    """
    world = current_world()
    log = collective_log(world)
    comm = world.communicator("dp", Mesh.of(world.size))
    comm.barrier(label="log_summary")
    late = stragglers(log, comm) if show_straggler else None
    if not log.records:
        say_on_rank_0(
            world.rank,
            "no collective was timed: set comms_logger.enabled in the config. What was issued lately:\n"
            + world.recorder.table(world.recorder.last[-20:]),
        )
    elif world.rank == 0:
        waiting = "" if late is None else f"\n\nwaiting for late ranks\n{straggler_table(late)}"
        sys.stdout.write(f"{log.table()}{waiting}\n")
    comm.barrier(label="log_summary")
    if not return_dict:
        return None
    about = {"world_size": world.size, "rank": world.rank, "timestamp": datetime.now(UTC).isoformat()}
    return {"summary": log.summary(), "straggler_analysis": late, "metadata": about}


def reset_log() -> None:
    """``log_summary`` begins here."""
    collective_log(current_world()).clear()
