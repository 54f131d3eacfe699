"""``deepspeed.moe.utils`` and ``moe.mappings``: parameters of experts in groups of their own, tokens of tp ranks.

Shoal needs no groups for experts: ``initialize`` knows their parameters by the layers that hold them. Groups that these
functions make are accepted, as any others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.comm import autograd
from shoal.comm.protocol import Communicator
from shoal.comm.world import current_world
from shoal.parallel.expert.held import modules_with_experts

Parameters = list[nn.Parameter]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """True and the first layer's number of experts if the model has layers of experts, else (False, 0)."""
    first = next((held.num_experts for _, _, held in modules_with_experts(m)), None)
    return first is not None, first or 0


def is_moe_param(param: torch.Tensor) -> bool:
    """True if it is marked as an expert's (``allreduce`` is False), so that data-parallel ranks do not share it."""
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[nn.Parameter]) -> tuple[Parameters, Parameters]:
    """The parameters that are no expert's, and those of experts."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Move the parameters of experts from the groups, in place, into groups after them, of at most ``max_group_size``.

    A group of experts has the options of the one that it comes from, ``moe`` true, and the name of the ranks that hold
    the other experts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    made = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        by_name: dict[str, list[Parameters]] = {}
        for param in experts:
            parts = by_name.setdefault(param.group_name, [[]])  # type: ignore[attr-defined]
            numel = sum(each.numel() for each in parts[-1]) + param.numel()
            if parts[-1] and max_group_size is not None and numel > max_group_size:
                parts.append([])
            parts[-1].append(param)
        made += [
            {**group, "name": name, "moe": True, "params": part} for name, parts in by_name.items() for part in parts
        ]
    return groups + made


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups with those of experts separate; unchanged if a group has ``moe``."""
    entries = list(model_parameters)
    if not entries or not isinstance(entries[0], dict):
        return split_params_into_different_moe_groups_for_optimizer({"params": entries, "name": "dense-params"})
    if any("moe" in group for group in entries):
        return entries
    return split_params_into_different_moe_groups_for_optimizer(entries)


# deepspeed.moe.mappings


def gather_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The parts of all tensor-parallel ranks, concatenated along ``dim``; in backward each takes its part."""
    comm = _tensor_parallel()
    return input_ if comm is None else autograd.gather(input_, comm, dim=dim, label="gather tokens")


def drop_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This tensor-parallel rank's part of ``input_`` along ``dim``; in backward the parts are gathered.

    Raises: UsageError: the ranks do not divide the dimension.
    """
    comm = _tensor_parallel()
    return input_ if comm is None else autograd.split(input_, comm, dim=dim, label="drop tokens")


def _tensor_parallel() -> Communicator | None:
    """The tensor-parallel ranks of the current mesh; None: there is one."""
    world = current_world()
    return world.communicator("tp", world.mesh) if world.mesh.tp > 1 else None
