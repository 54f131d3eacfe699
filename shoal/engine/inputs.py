"""A forward's inputs in the dtype that the model computes in."""

from __future__ import annotations

from typing import Any

import torch


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same structure of dicts, lists and tuples with its floating-point tensors cast; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    return value
