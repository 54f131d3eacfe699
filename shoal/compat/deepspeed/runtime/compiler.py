"""``deepspeed.runtime.compiler``: what torch's compiler says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_compile_supported() -> bool:
    return True


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which a compiler leaves as it is."""
    function: Callable[..., Any] = torch.compiler.disable(func)
    return function


__all__ = ["disable", "is_compile_supported", "is_compiling"]
