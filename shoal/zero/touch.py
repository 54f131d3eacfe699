"""Sees a parameter enter a torch function before the function reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SLOTS = vars(torch._C.TensorBase)
_READS_NO_VALUE = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.register_hook,
    torch.Tensor.requires_grad_,
    _SLOTS["requires_grad"].__set__,
    *(
        _SLOTS[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "grad", "requires_grad", "is_leaf", "is_meta")
    ),
}
DATA_ACCESS = frozenset({_SLOTS["data"].__get__, _SLOTS["data"].__set__})  # ``parameter.data``, read or assigned


class TouchMode(TorchFunctionMode):
    """While active, ``on_touch`` is called with each parameter whose value a torch function is about to read or write.

    Args:
        leave_out: more functions that count as reading no value.
    """

    def __init__(self, on_touch: Callable[[nn.Parameter], None], leave_out: Collection[object] = ()) -> None:
        super().__init__()
        self._on_touch = on_touch
        self._leave_out = _READS_NO_VALUE.union(leave_out)
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_on and not torch.compiler.is_compiling() and func not in self._leave_out:
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter):
                        self._on_touch(item)
        return func(*args, **kwargs)
