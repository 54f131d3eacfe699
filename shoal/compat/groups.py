"""``deepspeed.utils.groups``: the axes of the current mesh as torch process groups.

The current mesh is that of the engine that was made last, or of ``initialize_sequence_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.comm.world import current_world
from shoal.errors import AssertedUsageError, UsageError
from shoal.mesh import Mesh


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Raises: UsageError: ``ep_size`` is not 1. DeepSpeed takes it from the layers."""
    if ep_size != 1:
        raise UsageError(
            f"groups.initialize(ep_size={ep_size}) makes no groups of experts.",
            do="pass ep_size to deepspeed.moe.layer.MoE, and leave this call out.",
        )


def _group(axis: str, mesh: Mesh) -> Any:
    """Torch's process group along an axis; None for one rank without torch.distributed.

    Communicates: the first time, messages among its ranks: every rank calls.
    """
    world = current_world()
    return None if world.backend == "none" else world.process_group(axis, mesh)


def _size(axis: str, mesh: Mesh) -> int:
    return mesh.size(axis)


def _rank(axis: str, mesh: Mesh) -> int:
    return mesh.index(axis, current_world().rank)


def _ranks(axis: str, mesh: Mesh) -> list[int]:
    return list(mesh.ranks_along(axis, current_world().rank))


def _first_rank(axis: str, mesh: Mesh) -> int:
    return _ranks(axis, mesh)[0]


def _along(read: Callable[[str, Mesh], Any], axis: str) -> Callable[[], Any]:
    """``read`` along an axis of the current mesh."""
    return lambda: read(axis, current_world().mesh)


def _get_expert_model_parallel_world_size() -> int:
    return 1


def _get_broadcast_src_rank() -> int:
    return 0


_clone_world_group = _along(_group, "world")
_get_data_parallel_group = get_data_parallel_group = _along(_group, "dp")
_get_data_parallel_world_size = get_data_parallel_world_size = _along(_size, "dp")
_get_data_parallel_rank = get_data_parallel_rank = _along(_rank, "dp")
_get_sequence_data_parallel_group = _along(_group, "loss")
_get_sequence_data_parallel_world_size = _along(_size, "loss")
_get_sequence_data_parallel_rank = _along(_rank, "loss")
_get_sequence_parallel_group = _along(_group, "sequence")
_get_sequence_parallel_world_size = _along(_size, "sequence")
_get_sequence_parallel_rank = _along(_rank, "sequence")
get_tensor_model_parallel_group = get_model_parallel_group = _along(_group, "tp")
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _along(_size, "tp")
get_tensor_model_parallel_rank = get_model_parallel_rank = _along(_rank, "tp")
get_tensor_model_parallel_src_rank = _along(_first_rank, "tp")
_get_model_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group_ranks = _along(_ranks, "dp")


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


def _of_experts(read: Callable[[str, Mesh], Any], axis: str) -> Callable[[str], Any]:
    """``read`` along an axis of the mesh of a group of experts, by the group's name."""
    return lambda group_name: read(axis, _mesh_of_experts(group_name))


def _groups_of_experts(axis: str) -> Callable[[], dict[str, Any]]:
    """The group of the current mesh along an axis, by its name."""
    return lambda: {_get_max_expert_size_name(): _group(axis, current_world().mesh)}


_get_expert_parallel_group = _of_experts(_group, "ep")
_get_expert_parallel_group_ranks = _of_experts(_ranks, "ep")
_get_expert_parallel_world_size = _of_experts(_size, "ep")
_get_expert_parallel_rank = _of_experts(_rank, "ep")
_get_expert_parallel_src_rank = _of_experts(_first_rank, "ep")
_get_expert_parallel_group_dict = _groups_of_experts("ep")
_get_expert_data_parallel_group = _of_experts(_group, "expert_data")
_get_expert_data_parallel_group_ranks = _of_experts(_ranks, "expert_data")
_get_expert_data_parallel_world_size = _of_experts(_size, "expert_data")
_get_expert_data_parallel_rank = _of_experts(_rank, "expert_data")
_get_expert_broadcast_src_rank = _of_experts(_first_rank, "expert_data")
_get_expert_data_parallel_group_dict = _groups_of_experts("expert_data")


def _get_max_expert_size() -> int:
    return current_world().mesh.ep


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_zero_param_intra_parallel_group() -> Any:
    return None
