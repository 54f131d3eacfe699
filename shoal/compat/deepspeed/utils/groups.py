"""``deepspeed.utils.groups``: the axes of the current mesh as torch process groups.

The current mesh is that of the engine that was made last, or of ``initialize_sequence_parallel``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.comm.world import current_world
from shoal.compat.absent import not_built

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Raises: NotBuiltError: expert parallelism."""
    if ep_size != 1:
        raise not_built(f"groups.initialize(ep_size={ep_size}): expert parallelism", "leave it out.")


def _group(axis: str) -> Any:
    """Torch's process group along an axis of the current mesh; None for one rank without torch.distributed.

    Communicates: the first time, messages among its ranks: every rank calls.
    """
    world = current_world()
    return None if world.backend == "none" else world.process_group(axis, world.mesh)


def _size(axis: str) -> int:
    return current_world().mesh.size(axis)


def _rank(axis: str) -> int:
    world = current_world()
    return world.mesh.index(axis, world.rank)


def _zero() -> int:
    return 0


def _one() -> int:
    return 1


_clone_world_group = partial(_group, "world")
_get_data_parallel_group = get_data_parallel_group = partial(_group, "dp")
_get_data_parallel_world_size = get_data_parallel_world_size = partial(_size, "dp")
_get_data_parallel_rank = get_data_parallel_rank = partial(_rank, "dp")
_get_sequence_data_parallel_group = partial(_group, "loss")
_get_sequence_data_parallel_world_size = partial(_size, "loss")
_get_sequence_data_parallel_rank = partial(_rank, "loss")
_get_sequence_parallel_group = partial(_group, "sequence")
_get_sequence_parallel_world_size = partial(_size, "sequence")
_get_sequence_parallel_rank = partial(_rank, "sequence")
get_tensor_model_parallel_group = get_model_parallel_group = partial(_group, "tp")
get_tensor_model_parallel_world_size = get_model_parallel_world_size = partial(_size, "tp")
get_tensor_model_parallel_rank = get_model_parallel_rank = partial(_rank, "tp")
_get_model_parallel_world_size = get_model_parallel_world_size
_get_expert_model_parallel_world_size = _one
_get_broadcast_src_rank = _zero


def _ranks_along(axis: str) -> tuple[int, ...]:
    world = current_world()
    return world.mesh.ranks_along(axis, world.rank)


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this rank's tensor-parallel group."""
    return _ranks_along("tp")[0]


def _get_data_parallel_group_ranks() -> list[int]:
    return list(_ranks_along("dp"))


def _no_experts(group_name: str) -> Any:
    raise not_built(
        f"the group {group_name!r} of experts: expert parallelism",
        "keep all experts on each rank as plain modules, sharded by ZeRO stage 3.",
    )


_get_expert_parallel_group = _get_expert_parallel_world_size = _get_expert_parallel_rank = _no_experts
_get_expert_data_parallel_group = _get_expert_data_parallel_world_size = _get_expert_data_parallel_rank = _no_experts


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def _get_zero_param_intra_parallel_group() -> Any:
    return None
