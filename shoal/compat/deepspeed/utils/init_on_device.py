"""``deepspeed.OnDevice``: a model built on the meta device, or another one, in a dtype."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class OnDevice:
    """Inside, new tensors are on ``device``, and new floating-point ones have ``dtype`` unless they say otherwise.

    Args:
        dtype: of new tensors; None: torch's default.
        device: "meta" builds a model without memory; ``initialize`` gives it values.
        enabled: False: the context does nothing.
    """

    def __init__(self, dtype: torch.dtype | None, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._context: torch.device | None = None
        self._dtype_before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._dtype_before = torch.get_default_dtype()
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self._context = torch.device(self.device)
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, trace)
            self._context = None
            torch.set_default_dtype(self._dtype_before)


__all__ = ["OnDevice"]
