"""Sees a parameter enter a torch function, before the function reads it.

A tied head that computes ``x @ embedding.weight.T`` reads a parameter of another unit, which is sharded then. In the
first passes such an access gathers that unit, and the unit that runs records it, so later passes gather both. Under
``zero.Init`` an access gathers a parameter that is sharded already. Between a step and the next forward an access waits
for the parameter's gather; a sharded one is warned of, since what is computed from it is NaN.
Source: in DeepSpeed, ``register_external_parameter`` serves the same need.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from shoal.device import is_fake
from shoal.function_mode import UnorderedFunctionMode
from shoal.running.deferred_gathers import DeferredGathers
from shoal.running.order import kind_of_pass
from shoal.sharding.layout import uses_any
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


class ParameterAccessMode(UnorderedFunctionMode):
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


class OutsideReads:
    """Finds parameters that are read outside of their unit, in the first passes; later their reader gathers them.

    Args:
        unit_of: unit by ``id`` of a parameter.
        running: the units whose forward runs, the innermost last.

    Attributes: ``part``: of the model that the next pass runs, where passes run different ones; each is searched.
    """

    def __init__(self, unit_of: Mapping[int, Unit], running: Sequence[Unit], deferred: DeferredGathers) -> None:
        self.is_searching = False
        self.part = 0
        self._unit_of = unit_of
        self._running = running
        self._deferred = deferred
        self._has_sharded = any(unit.is_sharded for unit in unit_of.values())
        self._searched: set[tuple[str, int]] = set()  # kinds of passes, and parts, in which they are known

    def searching(self, model: nn.Module) -> AbstractContextManager[object]:
        """Look for them inside the block, in which ``model`` runs, if this is a first pass."""
        kind = (kind_of_pass(), self.part)
        has_any = self._has_sharded or self._deferred.is_pending
        if not has_any or kind in self._searched or torch.compiler.is_compiling():
            return nullcontext()
        return self._search(model, kind)

    def search_again(self) -> None:
        """The last pass was not the script's: look once more."""
        self._searched.discard((kind_of_pass(), self.part))

    @contextmanager
    def _search(self, model: nn.Module, kind: tuple[str, int]) -> Iterator[None]:
        self.is_searching = True
        try:
            with ParameterAccessMode(self._on_access, leave_out=_DATA_ACCESS), eagerly(model):
                yield
        finally:
            self.is_searching = False
        self._searched.add(kind)

    def _on_access(self, parameter: nn.Parameter) -> None:
        unit = self._unit_of.get(id(parameter))
        if unit is None or unit.state is UnitState.FULL:
            return
        reader = self._running[-1] if self._running else None
        if reader is unit and not uses_any(unit.used()):
            return  # its module runs without rows
        if reader is not None:
            reader.share(unit)
        self._deferred.add_read_early(unit)
        self._deferred.gather(unit)


class ReadsBetweenSteps:
    """Between a step and the next pass: what the script reads is valid, or it is warned, once.

    Args:
        units: all of a model.
        unit_of: unit by ``id`` of a parameter.
    """

    def __init__(self, units: Sequence[Unit], unit_of: Mapping[int, Unit], deferred: DeferredGathers) -> None:
        self._units = units
        self._sharded = [unit for unit in units if unit.is_sharded]
        self._unit_of = unit_of
        self._deferred = deferred
        self.has_warned = False

    def watch(self) -> None:
        """A step has ended.

        Does nothing inside a mode that the script may leave before ``stop``: torch would leave the one that watches.
        """
        has_any = self._sharded or self._deferred.is_pending
        if self.has_warned or not has_any or is_fake(next(self._units[0].parameters)):
            return
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # of ``torch.set_default_device``
        if all(m is default or isinstance(m, UnorderedFunctionMode) for m in _get_current_function_mode_stack()):
            _watching_mode().add(self)

    def stop(self) -> None:
        """The next pass begins, or the engine ends. Idempotent."""
        _watching_mode().discard(self)

    def before_read(self, parameter: nn.Parameter) -> None:
        unit = self._unit_of.get(id(parameter))
        if unit is not None:
            self._deferred.gather_if_pending(unit)

    def check(self, function: str, address: int) -> None:
        """Warn if a function that read the tensor at this address read a parameter that is sharded."""
        name = self._name_of(address)
        if name is None or self.has_warned or _is_copied():
            return
        self.has_warned = True
        warnings.warn(
            f"{function}() reads the sharded parameter {name!r} between two steps, where it is NaN; so is the result."
            " Call it inside `with shoal.zero.GatheredParameters(model.parameters()):`, on every rank.",
            stacklevel=4,
        )

    def _name_of(self, address: int) -> str | None:
        """The name of the sharded parameter with this placeholder."""
        if any(unit.is_released for unit in self._sharded):
            for group in (group for unit in self._units for group in unit.groups):
                for data, spec in zip(group.placeholders, group.buffer.layout.specs, strict=True):
                    if data.data_ptr() == address:
                        return spec.name
        return None


class _WatchingMode(ParameterAccessMode):
    """One thread's mode for all engines that are between two steps. It keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__(self._before_read, leave_out=[_SLOTS["data"].__set__])
        self._watching: list[weakref.ref[ReadsBetweenSteps]] = []

    def add(self, reads: ReadsBetweenSteps) -> None:
        self._watching = [weakref.ref(each) for each in self._live() if each is not reads] + [weakref.ref(reads)]
        if self not in _get_current_function_mode_stack():
            self.__enter__()

    def discard(self, reads: ReadsBetweenSteps) -> None:
        if self._watching:
            self._watching = [weakref.ref(each) for each in self._live() if each is not reads]
            if not self._watching:
                self.stop()

    def _live(self) -> list[ReadsBetweenSteps]:
        return [each for reference in self._watching if (each := reference()) is not None]

    def _before_read(self, parameter: nn.Parameter) -> None:
        for reads in self._live():
            reads.before_read(parameter)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        is_read = (
            func not in self._leave_out and not name.endswith(("_like", "__set__")) and not name.startswith("new_")
        )
        if is_read and not torch.compiler.is_compiling():
            results = _tensors(result) if result is not None else [None]
            if any(each is None or not is_placeholder(each) for each in results):
                for tensor in _tensors([*args, *(kwargs or {}).values()]):
                    if is_placeholder(tensor):
                        for reads in self._live():
                            reads.check(name, tensor.data_ptr())
        return result


_of_thread = threading.local()


def _watching_mode() -> _WatchingMode:
    """This thread's mode: torch has a stack of modes for each thread."""
    if not hasattr(_of_thread, "mode"):
        _of_thread.mode = _WatchingMode()
    mode: _WatchingMode = _of_thread.mode
    return mode


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
