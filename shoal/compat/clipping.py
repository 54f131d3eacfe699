"""``torch.nn.utils.clip_grad_norm_`` warns about parameters of an engine, while ``import deepspeed`` is Shoal.

On several ranks an engine moves the gradient of a parameter to its buffer as soon as it is complete, so torch's
function finds none: it changes nothing and returns a norm of 0, as under DeepSpeed. On one rank it finds the gradients
and clips them. Without the alias torch is not patched.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.nn.utils import clip_grad

from shoal.zero.parameter_owner import OWNERS

_own = clip_grad.clip_grad_norm_


@functools.wraps(_own)
def _clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if all(parameter.grad is None for parameter in given) and any(OWNERS.get(p) is not None for p in given):
        warnings.warn(
            "clip_grad_norm_() has no effect on parameters of an engine: the engine holds their gradients and clips"
            " them in step(). Set gradient_clipping in the config; engine.get_global_grad_norm() returns the norm"
            " after a step.",
            stacklevel=2,
        )
    return _own(given, *args, **kwargs)


def warn_of_clipping() -> None:
    """Replace torch's function by the one that warns."""
    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = _clip_grad_norm_


def restore_clipping() -> None:
    """Restore torch's function."""
    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = _own
