"""Imports the optimizer state that a client optimizer has when it is passed to ``initialize``.

The state is of earlier steps, or its constructor made it (torch's Adagrad). Each parameter's part is copied to the
ranges that hold it, in the main parameters' dtype, and the whole is freed on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.optim.elementwise import KNOWN, settings_of
from shoal.running.step import ShardedStep
from shoal.sharding.param_group import ParameterGroup

_OF_A_PARAMETER = ("step", "mu_product", "eta", "mu")  # torch's state of one number, whatever the parameter's shape


def import_state(step: ShardedStep, given_dtypes: Mapping[int, torch.dtype]) -> None:
    """Move the state of the user's parameters to the ranges. Every rank calls with the same state.

    Args:
        given_dtypes: of each parameter, by ``id``, when the optimizer was passed: state of that dtype follows the main
            parameters'.

    Optimizers that need whole parameters (LAMB, Muon) begin anew. Communicates nothing.
    """
    optimizer = step.optimizer
    if step.is_whole_tensor or not optimizer.state:
        return
    for group in step.groups:
        parameters = group.parameters
        states = [dict(optimizer.state.pop(parameter, {})) for parameter in parameters]
        if not any(states):
            continue
        ranges = [
            {key: value for key, value in state.items() if has_parameter_shape(key, value, parameter)}
            for state, parameter in zip(states, parameters, strict=True)
        ]
        scalars = [
            {key: _made(optimizer, key, value) for key, value in state.items() if key not in wide}
            for state, wide in zip(states, ranges, strict=True)
        ]
        dtypes = [
            {
                key: (step.state_dtype or group.main.dtype)
                if value.dtype == given_dtypes[id(parameter)]
                else value.dtype
                for key, value in wide.items()
            }
            for wide, parameter in zip(ranges, parameters, strict=True)
        ]
        step.allocate_state(group, scalars, dtypes)
        for slot, wide in enumerate(ranges):
            _fill(step, group, slot, wide)


@torch.no_grad()
def _fill(step: ShardedStep, group: ParameterGroup, slot: int, wide: dict[str, torch.Tensor]) -> None:
    for part, segment in group.ranges_of(slot):
        state = step.optimizer.state[part.param]
        for key, value in wide.items():
            target = state[key][segment.start : segment.stop]
            if value.is_meta:
                target.fill_(_first_value(step.optimizer, part.group, key))
            else:
                target.copy_(value.reshape(-1)[segment.offset : segment.offset + target.numel()])


def has_parameter_shape(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """True if the state has one element per parameter element. A 0-d state is recognised by its name."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or key not in _OF_A_PARAMETER


def _made(optimizer: torch.optim.Optimizer, key: str, value: Any) -> Any:
    """A state of one number; one that the constructor made on the meta device (fused Adagrad's step) gets its value."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.full((), _first_value(optimizer, 0, key), dtype=value.dtype, device="cpu")
    return value


def _first_value(optimizer: torch.optim.Optimizer, group: int, key: str) -> float:
    """What the constructor puts into each element of a state."""
    kind = next((base for base in type(optimizer).__mro__ if base in KNOWN), type(optimizer))
    settings = settings_of(kind, optimizer.param_groups[group])
    with unset_fake_temporarily():  # in a dry run, too, this is a value
        probe = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        return float(kind([probe], **settings).state[probe][key])
