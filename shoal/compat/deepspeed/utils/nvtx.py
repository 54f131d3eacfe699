"""``deepspeed.utils.nvtx``: a function as a range in a profiler's picture."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shoal.compat.deepspeed.accelerator import get_accelerator


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in a range of its name; on CPU as it is."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return ranged


__all__ = ["instrument_w_nvtx"]
