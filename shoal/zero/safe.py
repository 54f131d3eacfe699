"""DeepSpeed's safe accessors: values of a sharded parameter by the bare parameter.

See ``Access`` for what each returns and communicates.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import UsageError
from shoal.zero.access import Access
from shoal.zero.registry import OWNERS


def _access(parameter: nn.Parameter) -> Access:
    owner = OWNERS.get(parameter)
    if owner is None:
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no live engine.",
            do="pass a parameter of a model that shoal.initialize() got.",
            code="access-unknown",
        )
    return owner.access


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The fp32 master weight, whole. Every rank calls."""
    return _access(param).full_parameter(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weight and the parameter; the same value on every rank."""
    _access(param).set_full_parameter(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The reduced gradient, whole, fp32; None before backward. Every rank calls."""
    return _access(param).full_gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient; the same value on every rank."""
    _access(param).set_full_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One optimizer state (``exp_avg``, ...), whole, fp32; None before the first step. Every rank calls."""
    return _access(param).full_optimizer_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one optimizer state; the same value on every rank."""
    _access(param).set_full_optimizer_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the master weight, 1-D; None where it owns nothing of it."""
    return _access(param).local_parameter(param)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master weight."""
    _access(param).set_local_parameter(param, value)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient, 1-D, fp32."""
    return _access(param).local_gradient(param)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the reduced gradient; every rank its own."""
    _access(param).set_local_gradient(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, 1-D."""
    return _access(param).local_optimizer_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of one optimizer state."""
    _access(param).set_local_optimizer_state(param, optim_state_key, value)
