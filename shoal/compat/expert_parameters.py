"""``deepspeed.moe.utils``: which parameters belong to experts. For a model without experts its functions do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.compat.absent import not_built

_DO = "keep all experts on each rank as plain modules, sharded by ZeRO stage 3."


def is_moe_param(param: torch.Tensor) -> bool:
    """Is it marked as an expert's (``allreduce`` is False), so that data-parallel ranks do not share it?"""
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the model has DeepSpeed's MoE layers, and how many experts. Shoal has no such layer."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups, as they are. Raises: NotBuiltError: a parameter is marked as an expert's."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(param) for param in group["params"]):
            raise not_built("parameters of experts in a group of their own: expert parallelism", _DO)
    return groups


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters or groups as groups. Raises: NotBuiltError: a parameter is marked as an expert's."""
    entries = list(model_parameters)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    return split_params_into_different_moe_groups_for_optimizer(groups)


__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
]
