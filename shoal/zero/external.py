"""Finds parameters that are read outside their own unit's forward, in the first passes, and remembers who reads them.

A tied head that computes ``x @ embedding.weight.T`` reads another unit's parameter. At rest that parameter is a
stand-in; this mode sees it
enter a torch function, gathers its unit, and notes it as an external of the unit that is running, so later passes
gather both.
Source: the same need is met by ``register_external_parameter`` in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.zero.unit import Unit


class ExternalUseMode(TorchFunctionMode):
    """While active, a parameter at rest that enters a torch function is gathered first.

    Args:
        unit_of: unit by ``id`` of a parameter.
        on_use: called with a unit that is at rest and about to be read.
    """

    def __init__(self, unit_of: dict[int, Unit], on_use: Callable[[Unit], None]) -> None:
        super().__init__()
        self._unit_of = unit_of
        self._on_use = on_use

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in _READS_NO_VALUE:
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, torch.nn.Parameter):
                        unit = self._unit_of.get(id(item))
                        if unit is not None and unit.is_at_rest:
                            self._on_use(unit)
        return func(*args, **kwargs)


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Inside, compiled modules of ``model`` run as they were written.

    A compiled graph reads parameters where no mode sees it, and one traced under a mode is of no use without it.
    """
    modules = list(model.modules())
    wrapped = [(m, inner) for m in modules if isinstance(inner := getattr(m, "_orig_mod", None), nn.Module)]
    in_place = [m for m in modules if m._compiled_call_impl is not None]
    forwards = [module.forward for module, _ in wrapped]
    calls = [module._compiled_call_impl for module in in_place]
    for module, inner in wrapped:
        module.forward = inner.__call__
    for module in in_place:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for (module, _), forward in zip(wrapped, forwards, strict=True):
            module.forward = forward
        for module, call in zip(in_place, calls, strict=True):
            module._compiled_call_impl = call


_READS_NO_VALUE = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.register_hook,
    vars(torch._C.TensorBase)["data"].__get__,
    vars(torch._C.TensorBase)["data"].__set__,
    vars(torch._C.TensorBase)["shape"].__get__,
    vars(torch._C.TensorBase)["dtype"].__get__,
    vars(torch._C.TensorBase)["device"].__get__,
    vars(torch._C.TensorBase)["grad"].__get__,
    vars(torch._C.TensorBase)["requires_grad"].__get__,
}
