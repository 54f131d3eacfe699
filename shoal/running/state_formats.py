"""Optimizer state in another format than the main parameters: a step computes in fp32, and rounds what it has computed.

    main parameter (bf16)     -> fp32 \\
    gradient                  -> fp32  > the optimizer's step -> main parameter and state, each in its format
    state (bf16, int8, fp8)   -> fp32 /
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.sharding.encoded_state import decoded, is_elementwise
from shoal.sharding.param_group import ParameterGroup, ParameterRange
from shoal.sharding.stochastic_rounding import round_stochastically


def in_fp32(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """For each parameter one in fp32 that has its optimizer state, in fp32; the parameter itself where it is fp32.

    Memory: 4 bytes for each element of a 16-bit parameter or state, or of a state in blocks, until ``round_back``.
    """
    wide = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in params]
    for param, computed in zip(params, wide, strict=True):
        if state := optimizer.state.pop(param, None):
            numel = param.numel()
            optimizer.state[computed] = {k: _cast(v, numel, torch.float32) for k, v in decoded(state).items()}
    return wide


@torch.no_grad()
def round_back(
    optimizer: torch.optim.Optimizer,
    ranges: Sequence[tuple[ParameterGroup, ParameterRange]],
    wide: Sequence[torch.nn.Parameter],
    dtype: torch.dtype,
    step_number: int | None = None,
) -> None:
    """After the step: give the ranges what ``in_fp32`` returned, and their state back, in ``dtype`` and its format.

    Args:
        step_number: round parameters to bf16 stochastically, with this step's random bits; None: to the nearest.
    """
    for (group, part), computed in zip(ranges, wide, strict=True):
        if computed is not part.param and step_number is not None:
            specs = group.buffer.layout.specs
            round_stochastically(computed.detach(), part.param, part.segments, specs, step_number)
        elif computed is not part.param:
            part.param.copy_(computed)
        if state := optimizer.state.pop(computed, None):
            state = {key: _cast(value, computed.numel(), dtype) for key, value in state.items()}
            optimizer.state[part.param] = group.encoded(part, state)


def _cast(value: Any, numel: int, dtype: torch.dtype) -> Any:
    """An entry of the state; in ``dtype`` where it has one floating-point number for each element of its range."""
    return value.to(dtype) if is_elementwise(value, numel) and value.is_floating_point() else value
