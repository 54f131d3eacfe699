"""Optimizer state in another format than the main parameters: a step computes in fp32, and rounds what it has computed.

    main parameter (bf16) -> fp32 \\
    gradient              -> fp32  > the optimizer's step -> main parameter and state, each rounded to its format
    state (bf16)          -> fp32 /
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.sharding.param_group import is_elementwise


def in_fp32(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """For each parameter one in fp32 that has its optimizer state, in fp32; the parameter itself where it is fp32.

    Memory: 4 bytes for each element of a 16-bit parameter or state, until ``round_back``.
    """
    wide = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in params]
    for param, computed in zip(params, wide, strict=True):
        _move_state(optimizer, param, computed, torch.float32)
    return wide


@torch.no_grad()
def round_back(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    wide: Sequence[torch.nn.Parameter],
    dtype: torch.dtype,
) -> None:
    """After the step: give the parameters what ``in_fp32`` returned, and their state back in ``dtype``."""
    for param, computed in zip(params, wide, strict=True):
        if computed is not param:
            param.copy_(computed)
        _move_state(optimizer, computed, param, dtype)


def _move_state(
    optimizer: torch.optim.Optimizer, source: torch.nn.Parameter, target: torch.nn.Parameter, dtype: torch.dtype
) -> None:
    state = optimizer.state.pop(source, None)
    if state is not None:
        optimizer.state[target] = {key: _cast(value, source.numel(), dtype) for key, value in state.items()}


def _cast(value: Any, numel: int, dtype: torch.dtype) -> Any:
    """An entry of the state; in ``dtype`` where it has one floating-point number for each element of its range."""
    return value.to(dtype) if is_elementwise(value, numel) and value.is_floating_point() else value
