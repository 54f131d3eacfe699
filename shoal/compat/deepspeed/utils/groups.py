"""``deepspeed.utils.groups``: the axes as torch process groups. Ranks are data-parallel, or share a sequence."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shoal.comm.world import current_world
from shoal.compat.absent import not_built
from shoal.compat.sequence_parallel import current_unit

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


class _Alone:
    """A group of this rank only, made once for each world: every rank takes part in making all of them."""

    def __init__(self) -> None:
        self.of: Any = None
        self.group: Any = None

    def get(self) -> Any:
        if not dist.is_initialized():
            return None
        if self.of is not dist.group.WORLD:
            if dist.get_world_size() == 1:
                self.group = dist.group.WORLD
            else:
                self.group = dist.new_subgroups(1)[0]
            self.of = dist.group.WORLD
        return self.group


_alone = _Alone()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Raises: NotBuiltError: expert parallelism."""
    if ep_size != 1:
        raise not_built(f"groups.initialize(ep_size={ep_size}): expert parallelism", "leave it out.")


def _everyone() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _rank() -> int:
    return current_world().rank


def _size() -> int:
    return current_world().size


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def _only_rank() -> Any:
    """Communicates: the first time, messages over the whole world: every rank calls."""
    return _alone.get()


def _get_sequence_parallel_group() -> Any:
    """The ranks that share a sequence; this rank alone without sequence parallelism."""
    unit = current_unit()
    return _only_rank() if unit is None else unit.get_sequence_parallel_group()


def _get_sequence_parallel_world_size() -> int:
    unit = current_unit()
    return 1 if unit is None else unit.get_sequence_parallel_world_size()


def _get_sequence_parallel_rank() -> int:
    unit = current_unit()
    return 0 if unit is None else unit.get_sequence_parallel_rank()


def get_data_parallel_group() -> Any:
    """The ranks that see other samples."""
    unit = current_unit()
    return _everyone() if unit is None else unit.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    return _size() // _get_sequence_parallel_world_size()


def get_data_parallel_rank() -> int:
    return _rank() // _get_sequence_parallel_world_size()


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size

_get_sequence_data_parallel_group = _clone_world_group = _everyone
_get_sequence_data_parallel_rank = _rank
_get_sequence_data_parallel_world_size = _size

_get_model_parallel_world_size = _get_expert_model_parallel_world_size = _one
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _one
get_tensor_model_parallel_rank = get_model_parallel_rank = _get_broadcast_src_rank = _zero
get_tensor_model_parallel_group = get_model_parallel_group = _only_rank
get_tensor_model_parallel_src_rank = _rank


def _get_data_parallel_group_ranks() -> list[int]:
    size = _get_sequence_parallel_world_size()
    return list(range(_rank() % size, _size(), size))


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
