"""``deepspeed.utils.torch``: which torch this is, and a hook on a finished gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Is the installed torch within the bounds, both included?"""
    installed = _numbers(torch.__version__)
    low, high = _numbers(min_version), _numbers(max_version)
    return (not low or installed[: len(low)] >= low) and (not high or installed[: len(high)] <= high)


def _numbers(version: Any) -> tuple[int, ...]:
    if version is None:
        return ()
    pieces = str(version).partition("+")[0].split(".")
    return tuple(int("".join(letter for letter in piece if letter.isdigit()) or 0) for piece in pieces[:3])


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` once its gradient is accumulated. Returns: the handle."""
    return param.register_post_accumulate_grad_hook(hook)


__all__ = ["register_grad_hook", "required_torch_version"]
