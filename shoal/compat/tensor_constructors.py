"""Under DeepSpeed's ``zero.Init`` tensors are made in the config's dtype, by a wrapper that clients may replace.

    torch.zeros(3)                      -> wrapped[torch.zeros](3)
    wrapped[fn] = zero_wrapper_for_fp_tensor_constructor(fn, dtype, target_device=device)

Transformers replaces the wrapper, by its module's name, before it opens the context, so that ``torch.arange`` is left
alone. Torch is not patched here: a mode sees the calls of the thread that builds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Constructor = Callable[..., torch.Tensor]

CONSTRUCTORS: tuple[Constructor, ...] = (
    torch.tensor,
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.eye,
    torch.randn,
)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Constructor, target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Constructor:
    """``fn``, whose floating-point tensors come out in a dtype, and on a device where the caller names none."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is not None and made.is_floating_point():
            made.data = made.data.to(target_fp_dtype)
        return made

    return wrapped


class ConstructorMode(TorchFunctionMode):
    """While active, calls of the constructors go through their wrappers.

    Args:
        wrapper: as ``zero_wrapper_for_fp_tensor_constructor``.
    """

    def __init__(self, wrapper: Callable[..., Constructor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._wrapped = {fn: wrapper(fn, dtype, target_device=device) for fn in CONSTRUCTORS}
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrapped = self._wrapped.get(func) if self.is_on else None
        return (wrapped if wrapped is not None else func)(*args, **(kwargs or {}))
