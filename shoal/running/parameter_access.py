"""Sees a parameter enter a torch function, before the function reads it.

A tied head that computes ``x @ embedding.weight.T`` reads a parameter of another unit, which is sharded then. In the
first passes such an access gathers that unit, and the unit that runs records it, so later passes gather both. Under
``zero.Init`` an access gathers a parameter that is sharded already. Between a step and the next forward an access waits
for the parameter's gather; a sharded one is warned of, since what is computed from it is NaN.
Source: in DeepSpeed, ``register_external_parameter`` serves the same need.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

from shoal.sharding.storage import is_placeholder
from shoal.sharding.unit import Unit, UnitState

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
_DATA_ACCESS = frozenset({_SLOTS["data"].__get__, _SLOTS["data"].__set__})  # ``parameter.data``, read or assigned


class ParameterAccessMode(TorchFunctionMode):
    """While active, ``on_access`` is called with each parameter whose value a torch function is about to read or write.

    Args:
        leave_out: more functions that count as reading no value.
    """

    def __init__(self, on_access: Callable[[nn.Parameter], None], leave_out: Collection[object] = ()) -> None:
        super().__init__()
        self._on_access = on_access
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
                        self._on_access(item)
        return func(*args, **kwargs)


def gather_on_access(unit_of: dict[int, Unit], on_access: Callable[[Unit], None]) -> ParameterAccessMode:
    """While active, ``on_access`` is called with the unit of a parameter that is about to be read and is not whole.

    Args:
        unit_of: unit by ``id`` of a parameter.
    """

    def find(parameter: nn.Parameter) -> None:
        unit = unit_of.get(id(parameter))
        if unit is not None and unit.state is not UnitState.FULL:
            on_access(unit)

    return ParameterAccessMode(find, leave_out=_DATA_ACCESS)


class ReadsBetweenSteps(ParameterAccessMode):
    """While it is watching, a computation on values of sharded parameters is warned of, once.

    Args:
        on_access: called with a parameter before its data is read.
        name_of: gives the name of a sharded parameter by the address of its placeholder.
    """

    def __init__(self, on_access: Callable[[nn.Parameter], None], name_of: Callable[[int], str | None]) -> None:
        super().__init__(on_access, leave_out=[_SLOTS["data"].__set__])
        self._name_of = name_of
        self.has_warned = False

    def watch(self) -> None:
        """Begin. Does nothing inside a mode that the script may leave before ``stop``: torch would leave this one."""
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # of ``torch.set_default_device``
        if not self.has_warned and all(m is default or isinstance(m, ReadsBetweenSteps) for m in _modes()):
            self.__enter__()

    def stop(self) -> None:
        """End, in whatever order modes were entered. Idempotent."""
        if self in _modes():
            outer = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
            for mode in reversed(outer):
                if mode is not self:
                    _push_on_torch_function_stack(mode)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        is_read = (
            func not in self._leave_out and not name.endswith(("_like", "__set__")) and not name.startswith("new_")
        )
        if not self.has_warned and is_read and not torch.compiler.is_compiling():
            results = _tensors(result) if result is not None else [None]
            if any(each is None or not is_placeholder(each) for each in results):
                self._check(name, _tensors([*args, *(kwargs or {}).values()]))
        return result

    def _check(self, function: str, read: Iterable[torch.Tensor]) -> None:
        for tensor in read:
            parameter = self._name_of(tensor.data_ptr()) if is_placeholder(tensor) else None
            if parameter is not None:
                if _is_copied():
                    return
                self.has_warned = True
                warnings.warn(
                    f"{function}() reads the sharded parameter {parameter!r} between two steps, where it is NaN; so is"
                    " the result. Call it inside `with shoal.zero.GatheredParameters(model.parameters()):`, on every"
                    " rank.",
                    stacklevel=4,
                )
                return


def _is_copied() -> bool:
    """True inside of ``copy.deepcopy`` of a parameter: a copy of its module is an error, which says what to do."""
    frame = sys._getframe(3)
    for _ in range(3):
        if frame.f_code.co_name in ("__deepcopy__", "__reduce_ex__"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _modes() -> list[TorchFunctionMode]:
    return [_get_function_stack_at(at) for at in range(_len_torch_function_stack())]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Inside the block, compiled modules of ``model`` run uncompiled.

    A compiled graph reads parameters without calling the mode, and a graph traced under a mode cannot run without it.
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
