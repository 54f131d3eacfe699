"""Optimizer state that is there when the optimizer is handed in goes along.

It is of steps that the optimizer took before, or its constructor made it (torch's Adagrad). Each parameter's part goes
to the pieces of its range, in the master weights' format, and the whole is let go: no rank keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.optim.elementwise import KNOWN, settings_of
from shoal.zero.bucket_state import BucketState
from shoal.zero.step import ShardedStep

_OF_A_PARAMETER = ("step", "mu_product", "eta", "mu")  # torch's state of one number, whatever the parameter's shape


def adopt_state(step: ShardedStep) -> None:
    """Move the state of the user's parameters to the pieces. Every rank calls with the same state.

    Optimizers that need whole parameters (LAMB, Muon) begin anew. Communicates nothing.
    """
    optimizer = step.optimizer
    if step.is_whole_tensor or not optimizer.state:
        return
    for state in step.states:
        parameters = state.bucket.parameters
        held = [dict(optimizer.state.pop(parameter, {})) for parameter in parameters]
        if not any(held):
            continue
        ranges = [
            {key: value for key, value in own.items() if _is_elementwise(key, value, parameter)}
            for own, parameter in zip(held, parameters, strict=True)
        ]
        scalars = [
            {key: value for key, value in own.items() if key not in wide}
            for own, wide in zip(held, ranges, strict=True)
        ]
        dtypes = [
            {key: state.master.dtype if value.dtype == parameter.dtype else value.dtype for key, value in wide.items()}
            for wide, parameter in zip(ranges, parameters, strict=True)
        ]
        step.make_room(state, scalars, dtypes)
        for slot, wide in enumerate(ranges):
            _fill(step, state, slot, wide)


@torch.no_grad()
def _fill(step: ShardedStep, state: BucketState, slot: int, wide: dict[str, torch.Tensor]) -> None:
    for piece, segment in step.pieces_of_slot(state, slot):
        held = step.optimizer.state[piece.param]
        for key, value in wide.items():
            target = held[key][segment.start : segment.stop]
            if value.is_meta:
                target.fill_(_first_value(step.optimizer, piece.group, key))
            else:
                target.copy_(value.reshape(-1)[segment.offset : segment.offset + target.numel()])


def _is_elementwise(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Has it one number for each of the parameter's? Of a 0-d one only the name tells."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or key not in _OF_A_PARAMETER


def _first_value(optimizer: torch.optim.Optimizer, group: int, key: str) -> float:
    """What the constructor puts into each element of a state."""
    kind = next((base for base in type(optimizer).__mro__ if base in KNOWN), type(optimizer))
    settings = settings_of(kind, optimizer.param_groups[group])
    probe = nn.Parameter(torch.zeros(1))
    return float(kind([probe], **settings).state[probe][key])
