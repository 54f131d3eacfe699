"""Rotary embeddings of Transformers whose frequencies depend on the longest sequence (``dynamic``, ``longrope``).

They take the largest of their ``position_ids`` for its length. A rank that holds the first positions would compute
other frequencies than the others, so its module is given the largest position of all ranks beside its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shoal.compiler import untraced
from shoal.parallel.sequence.context import SequenceContext, current_sequence_context


def follow_longest_sequence(model: nn.Module) -> list[Any]:
    """Hook the rotary embeddings of ``model`` that depend on the length.

    Communicates: in each of their forwards an exchange of 8 bytes over ``sp`` and ``cp``.
    Returns: the hooks.
    """
    hooks: list[Any] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            hooks.append(module.register_forward_pre_hook(_with_longest, with_kwargs=True))
            hooks.append(module.register_forward_hook(_without_longest))
    return hooks


@untraced
def _with_longest(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    context = current_sequence_context()
    if context is None or context.size == 1:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _extended(kwargs["position_ids"], context)}
    return (args[0], _extended(args[1], context), *args[2:]), kwargs


def _without_longest(_module: nn.Module, _args: Any, output: Any) -> Any:
    context = current_sequence_context()
    if context is None or context.size == 1:
        return None
    return tree_map_only(torch.Tensor, lambda tensor: tensor[..., :-1, :], output)


def _extended(positions: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    """One more position in each row: the largest of all ranks."""
    largest = positions.max().double().view(1)
    for comm in (context.sp, context.cp):
        if comm is not None and comm.size > 1:
            largest = comm.exchange(largest, label="longest sequence").wait().max().view(1)
    last = largest.to(positions).expand(*positions.shape[:-1], 1)
    return torch.cat((positions, last), -1)
