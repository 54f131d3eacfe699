"""Optimizers that cannot be given pieces of flat weights: those that hold others, and those of sparse gradients.

An optimizer that holds others (an Adam for the dense weights, a SparseAdam for the tables) leaves its own groups aside
and steps the model's parameters by theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that are attributes of one, or in a list, tuple or dict that is; theirs after them. Each once."""
    found: dict[int, torch.optim.Optimizer] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            if value is not optimizer and id(value) not in found:
                found[id(value)] = value
                search(value)
        elif isinstance(value, list | tuple):
            visit_all(value)
        elif isinstance(value, Mapping):
            visit_all(value.values())

    def visit_all(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.optim.Optimizer):
                visit(value)

    def search(holder: torch.optim.Optimizer) -> None:
        for name, value in vars(holder).items():
            if name not in ("state", "param_groups", "defaults"):
                visit(value)

    search(optimizer)
    return list(found.values())


def has_own_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Does it hold an optimizer whose groups are not its own ones? (A wrapper shares those of what it wraps.)"""
    own = {id(group) for group in optimizer.param_groups}
    return any(id(group) not in own for held in inner_optimizers(optimizer) for group in held.param_groups)


def takes_sparse_only(optimizer: torch.optim.Optimizer) -> bool:
    """Does it refuse a gradient that is not a sparse tensor?"""
    return isinstance(optimizer, torch.optim.SparseAdam)


def of_sparse_only(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ``id`` of each parameter that such an optimizer steps, held or holding."""
    return {
        id(parameter)
        for holder in (optimizer, *inner_optimizers(optimizer))
        if takes_sparse_only(holder)
        for group in holder.param_groups
        for parameter in group["params"]
    }
