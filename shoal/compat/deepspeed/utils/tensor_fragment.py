"""``deepspeed.utils.tensor_fragment``: whole values and local parts of sharded parameters, gradients and states.

Shoal's own functions, with DeepSpeed's results for missing values: None for a frozen parameter, where Shoal's functions
raise; a tensor of no elements for a part that this rank does not own, where Shoal's functions return None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal import zero
from shoal.access.engine_parameters import EngineParameters
from shoal.running.parameter_owner import OWNERS
from shoal.zero import (
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)


def _is_frozen(parameter: nn.Parameter) -> bool:
    """True for a frozen parameter of an engine."""
    owner = OWNERS.get(parameter)
    return isinstance(owner, EngineParameters) and not owner.knows(parameter)


def _has_gradient(parameter: nn.Parameter) -> bool:
    owner = OWNERS.get(parameter)
    return isinstance(owner, EngineParameters) and owner.has_gradient(parameter)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The fp32 main parameter, whole; None of a frozen parameter. Every rank calls."""
    return None if _is_frozen(param) else zero.safe_get_full_fp32_param(param)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The reduced gradient, whole, fp32; None before backward, and of a frozen parameter. Every rank calls."""
    return None if _is_frozen(param) else zero.safe_get_full_grad(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One optimizer state, whole; None before the first step, and of a frozen parameter. Every rank calls."""
    return None if _is_frozen(param) else zero.safe_get_full_optimizer_state(param, optim_state_key)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the main parameter, 1-D; None of a frozen parameter."""
    return None if _is_frozen(param) else _or_nothing(zero.safe_get_local_fp32_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient, 1-D, fp32; None before backward, and of a frozen parameter."""
    if _is_frozen(param) or not _has_gradient(param):
        return None
    return _or_nothing(zero.safe_get_local_grad(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, 1-D; None of a frozen parameter, and before the first step."""
    if _is_frozen(param):
        return None
    found = zero.safe_get_local_optimizer_state(param, optim_state_key)
    if found is None and zero.safe_get_local_fp32_param(param) is None:
        return torch.empty(0)
    return found


def _or_nothing(part: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0) if part is None else part


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by ``update_func(gradient, parameter)``. Every rank calls.

    Communicates: an all_gather of each gradient.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
