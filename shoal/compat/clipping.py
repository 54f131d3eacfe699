"""``torch.nn.utils.clip_grad_norm_`` warns, while the name is lent, where it sees parameters of an engine.

On several ranks an engine takes the gradient of a parameter as soon as it is complete, so torch's function finds none:
it changes nothing and returns a norm of 0, under DeepSpeed as here. On one rank it finds the gradients and clips them.
While the name is not lent, torch stays as it is.
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


def lend() -> None:
    """Put the function that warns in the place of torch's."""
    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = _clip_grad_norm_


def take_back() -> None:
    """Put torch's own back."""
    torch.nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_ = _own
