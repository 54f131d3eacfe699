"""Stage 0 of AutoEP: an optimizer's state without names, of a model in which AutoEP has replaced parameters.

A group that DeepSpeed makes itself lists its parameters in the order of the model. Where the script has given the
groups, AutoEP takes the parameters that it replaced out of theirs, and appends the new ones, and DeepSpeed then splits
the experts off into groups of their own:

    the script      embed    gate     gate_up_proj    down_proj    shared_expert    head
    AutoEP          embed    shared_expert    head    router.gate          w1    w2    w3

Exactly one of the two orders has to fit, or both have to give the same tensors the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from shoal.compat.checkpoints.autoep import AutoEpLayer, of_expert, on_rank, under
from shoal.compat.checkpoints.autoep_names import ModelNames
from shoal.compat.checkpoints.state import FlatState, entry
from shoal.compat.checkpoints.unnamed import read_unnamed, unclear
from shoal.errors import CheckpointError

_Groups = list[list[str]]
_Value = TypeVar("_Value")


def read_replaced(
    state: dict[str, Any],
    dense: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    names: Sequence[Sequence[str]] | None,
    file: str,
    layers: Sequence[AutoEpLayer],
    own_names: ModelNames,
) -> FlatState:
    """The optimizer's state of one expert-parallel rank, under AutoEP's names.

    Args:
        dense: the parameters that are not experts', in the model's order.
        own: those of this rank's experts.
        names: of each group, the model's names of its parameters, where the caller knows them.

    Raises: CheckpointError: no order of the parameters fits, or two that differ.
    """
    starts = tuple(f"{under(layer.path)}router." for layer in layers)
    number = len(entry(state.get("optimizer_state_dict", state), "param_groups", file))
    said = None if names is None else _groups(names, number, dense, own, layers, own_names)
    found: list[FlatState] = []
    problem: CheckpointError | None = None
    for is_moved in (False, True):
        parameters = _ordered({**dense, **own}, starts, is_moved=is_moved)
        groups = said and [list(_ordered(dict.fromkeys(group), starts, is_moved=is_moved)) for group in said]
        try:
            found.append(read_unnamed(state, parameters, groups, file))
        except CheckpointError as error:
            problem = problem or error
    if not found:
        assert problem is not None
        raise problem
    if len(found) > 1 and found[0].places != found[1].places:
        raise unclear("AutoEP's routers may have two places in its groups", file)
    return found[0]


def _ordered(values: Mapping[str, _Value], starts: tuple[str, ...], *, is_moved: bool) -> dict[str, _Value]:
    """By name: as they are; or those whose names begin so after the others."""
    moved = {name: value for name, value in values.items() if is_moved and name.startswith(starts)}
    return {name: value for name, value in values.items() if name not in moved} | moved


def _groups(
    names: Sequence[Sequence[str]],
    number: int,
    dense: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    layers: Sequence[AutoEpLayer],
    own_names: ModelNames,
) -> _Groups | None:
    """AutoEP's names of each of ``number`` groups; None: those given do not say them.

    Where there are more groups than the caller has, the experts of each have a group of their own, after all others.
    """
    group_of = {each: index for index, group in enumerate(names) for name in group for each in own_names.parts(name)}
    first = {
        on_rank(tensor, rank): of_expert(tensor, experts[0])
        for layer in layers
        for tensor in layer.tensors
        for rank, experts in enumerate(layer.experts_of)
    }
    if not all(first[part] in group_of for part in own):
        return None
    groups = [[each for name in group for each in own_names.parts(name) if each in dense] for group in names]
    experts: _Groups = [[part for part in own if group_of[first[part]] == index] for index in range(len(names))]
    groups = groups + experts if len(names) < number else [a + b for a, b in zip(groups, experts, strict=True)]
    return [group for group in groups if group]
