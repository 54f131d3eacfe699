"""A forward's inputs in the dtype that the model computes in, and what to do where another one meets it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


def explain_mixed_formats(error: Exception, model: nn.Module, parameter: torch.dtype | None) -> None:
    """Where a forward failed over formats, and buffers have another one than the parameters, say so beside the error.

    Args:
        parameter: the format that the config gives parameters; None: their own.
    """
    if parameter is None or not isinstance(error, RuntimeError):
        return
    if not any(word in str(error) for word in ("dtype", "scalar type")):
        return
    names = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dtype != parameter]
    if names:
        short = str(parameter).removeprefix("torch.")
        error.add_note(
            f"shoal: buffers keep a format of their own beside parameters in {short}: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. If the model mixes them with activations, cast"
            ' them there (buffer.to(x.dtype)), or set "data_types": {"buffer_dtype": "..."} in the config.'
        )
