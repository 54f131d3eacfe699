"""``deepspeed.utils.groups``: the axes of the current mesh as torch process groups.

The current mesh is that of the engine that was made last, or of ``initialize_sequence_parallel``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from shoal.comm.world import current_world
from shoal.errors import AssertedUsageError, UsageError
from shoal.mesh import Mesh

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
    """Raises: UsageError: ``ep_size`` is not 1. DeepSpeed takes it from the layers."""
    if ep_size != 1:
        raise UsageError(
            f"groups.initialize(ep_size={ep_size}) makes no groups of experts.",
            do="pass ep_size to deepspeed.moe.layer.MoE, and leave this call out.",
        )


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


# Experts. A group is named after its number of ranks: ``ep_size_4`` of the current mesh's, or ``ep_size_1``, those of
# layers whose experts are not divided.


def _mesh_of_experts(group_name: str) -> Mesh:
    mesh = current_world().mesh
    for size in (mesh.ep, 1):
        if group_name == f"ep_size_{size}":
            return replace(mesh, ep=size)
    raise AssertedUsageError(
        f"expert parallel group is not initialized: {group_name!r}, where the current mesh has ep {mesh.ep}.",
        do="ask for it after initialize() of a model with such layers.",
        code="expert-group",
    )


def _expert_group(axis: str, group_name: str) -> Any:
    """As ``_group``."""
    world, mesh = current_world(), _mesh_of_experts(group_name)
    return None if world.backend == "none" else world.process_group(axis, mesh)


def _expert_ranks(axis: str, group_name: str) -> list[int]:
    return list(_mesh_of_experts(group_name).ranks_along(axis, current_world().rank))


def _expert_size(axis: str, group_name: str) -> int:
    return _mesh_of_experts(group_name).size(axis)


def _expert_rank(axis: str, group_name: str) -> int:
    return _mesh_of_experts(group_name).index(axis, current_world().rank)


def _first_expert_rank(axis: str, group_name: str) -> int:
    return _expert_ranks(axis, group_name)[0]


def _expert_groups(axis: str) -> dict[str, Any]:
    name = _get_max_expert_size_name()
    return {name: _expert_group(axis, name)}


_get_expert_parallel_group = partial(_expert_group, "ep")
_get_expert_parallel_group_ranks = partial(_expert_ranks, "ep")
_get_expert_parallel_world_size = partial(_expert_size, "ep")
_get_expert_parallel_rank = partial(_expert_rank, "ep")
_get_expert_parallel_src_rank = partial(_first_expert_rank, "ep")
_get_expert_parallel_group_dict = partial(_expert_groups, "ep")
_get_expert_data_parallel_group = partial(_expert_group, "expert_data")
_get_expert_data_parallel_group_ranks = partial(_expert_ranks, "expert_data")
_get_expert_data_parallel_world_size = partial(_expert_size, "expert_data")
_get_expert_data_parallel_rank = partial(_expert_rank, "expert_data")
_get_expert_broadcast_src_rank = partial(_first_expert_rank, "expert_data")
_get_expert_data_parallel_group_dict = partial(_expert_groups, "expert_data")


def _get_max_expert_size() -> int:
    return current_world().mesh.ep


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_zero_param_intra_parallel_group() -> Any:
    return None
