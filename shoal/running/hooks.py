"""The hooks on modules and on autograd: each calls a verb of the runtime, or warns of a read of sharded parameters.

All handles are kept; ``detach`` gives the model back as it was. ``state_dict()``, ``copy.deepcopy()`` and
``torch.save()`` of a module find a placeholder where a parameter is sharded: its shape, and NaN. Nothing in that is an
error to them, and a checkpoint of NaN is found out too late.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.compiler import untraced
from shoal.errors import UsageError
from shoal.sharding.unit import Unit, UnitState


class Runtime(Protocol):
    def before_model(self) -> None: ...
    def after_model(self, output: Any) -> None: ...
    def before_forward(self, unit: Unit) -> None: ...
    def after_forward(self, unit: Unit, inputs: Any, output: Any) -> None: ...
    def gradient_ready(self, unit: Unit, index: int) -> None: ...


class Switch:
    """True if the hooks that gather and release units act."""

    def __init__(self) -> None:
        self.is_on = True


class HookSet:
    """Every hook that Shoal has on one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._on_gradients: list[tuple[nn.Parameter, Callable[[torch.Tensor], None]]] = []
        self._gradient_handles: list[RemovableHandle] = []
        self.switch = Switch()

    def on_model(self, model: nn.Module, runtime: Runtime) -> None:
        switch = self.switch

        def before(called: nn.Module, _args: Any) -> None:
            if called is model and switch.is_on:  # a copy of the model carries its hooks
                runtime.before_model()

        def after(called: nn.Module, _args: Any, output: Any) -> None:
            if called is model and switch.is_on:
                runtime.after_model(output)

        self._handles.append(model.register_forward_pre_hook(untraced(before), prepend=True))
        self._handles.append(model.register_forward_hook(untraced(after)))

    def on_unit(self, module: nn.Module, unit: Unit, runtime: Runtime) -> None:
        switch = self.switch

        def before(called: nn.Module, _args: Any) -> None:
            if called is module and switch.is_on:
                runtime.before_forward(unit)

        def after(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if called is module and switch.is_on:
                runtime.after_forward(unit, (args, kwargs), output)

        # The user's own hooks find the module as its forward does: whole.
        self._handles.append(module.register_forward_pre_hook(untraced(before), prepend=True))
        self._handles.append(module.register_forward_hook(untraced(after), with_kwargs=True))

    def before_unit(self, module: nn.Module, use: Callable[[Unit], None], unit: Unit) -> None:
        """Call ``use(unit)`` before each forward of the module."""

        def before(called: nn.Module, _args: Any) -> None:
            if called is module:
                use(unit)

        self._handles.append(module.register_forward_pre_hook(untraced(before), prepend=True))

    def before_state_dict(self, model: nn.Module, wait: Callable[[], None]) -> None:
        """Call ``wait`` before the model's, or a part's, ``state_dict()``."""
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: wait()))

    def on_gradient(self, parameter: nn.Parameter, unit: Unit, index: int, runtime: Runtime) -> None:
        # Weak: the garbage collector does not see what a hook on a gradient holds, so a dropped engine would stay.
        runtime_of, unit_of = weakref.ref(runtime), weakref.ref(unit)

        def ready(_parameter: torch.Tensor) -> None:
            if (live := runtime_of()) is not None and (its_unit := unit_of()) is not None:
                live.gradient_ready(its_unit, index)

        self._on_gradients.append((parameter, ready))
        self._gradient_handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def listen_to_gradients(self, is_on: bool) -> None:
        """Remove the hooks of ``on_gradient`` for a while, or put them back: a hook costs more than a small sum."""
        if is_on and not self._gradient_handles:
            self._gradient_handles = [p.register_post_accumulate_grad_hook(ready) for p, ready in self._on_gradients]
        elif not is_on and self._gradient_handles:
            for handle in self._gradient_handles:
                handle.remove()
            self._gradient_handles.clear()

    def on_state_dict(self, model: nn.Module, sharded_of: Mapping[int, Unit]) -> None:
        """``sharded_of``: the sharded unit by ``id`` of a parameter."""
        notice = Notice()
        for name, module in model.named_modules():
            units = [sharded_of[id(p)] for p in module._parameters.values() if id(p) in sharded_of]
            if units:
                hook = ShardedReadHook(name, module, list(dict.fromkeys(units)), notice)
                self._handles.append(module.register_state_dict_pre_hook(hook))

    def detach(self) -> None:
        self.listen_to_gradients(False)
        self._on_gradients.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def accumulates_into(parameters: Iterable[nn.Parameter]) -> bool:
    """True if the backward pass in this thread will accumulate a gradient into some of these parameters.

    ``autograd.grad`` on inputs will not.
    """
    for parameter in parameters:
        if not parameter.requires_grad:  # frozen for a while
            continue
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # autograd.grad on this very parameter: it returns the gradient, and accumulates none
            continue
    return False


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples, lists, mappings, dataclasses and plain objects' attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
    elif depth < 4 and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


def refuse_sharded(unit: Unit) -> None:
    """Raises: UsageError: a transform of torch.func reads parameters that are not gathered."""
    if unit.is_sharded and unit.state is not UnitState.FULL:
        raise UsageError(
            f"torch.func transforms the forward of unit {unit.name!r}, whose parameters are sharded: nothing gathers"
            " them again for the transform's own backward.",
            do="call the transform inside `with shoal.zero.GatheredParameters(model.parameters()):`, on every rank; or"
            " use ZeRO stage 2.",
            code="transform-sharded",
        )


_WHOLE = "`with shoal.zero.GatheredParameters(model.parameters()):`, on every rank"


class Notice:
    """What one engine says at most once."""

    def __init__(self) -> None:
        self.is_given = False


class ShardedReadHook:
    """A ``state_dict`` pre-hook of one module that holds sharded parameters.

    It warns before the values are read. It is also copied and pickled with the module, and refuses while a parameter
    is sharded; a copy of the module gets a hook that does nothing.
    """

    def __init__(self, name: str, module: nn.Module, units: Sequence[Unit], notice: Notice) -> None:
        self._name = name or type(module).__name__
        self._module = module
        self._units = tuple(units)
        self._notice = notice

    def __call__(self, called: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if called is not self._module or not self._is_sharded or self._notice.is_given:
            return
        self._notice.is_given = True
        warnings.warn(
            f"state_dict() reads sharded parameters: those of {self._name!r}, and all others that are not gathered,"
            f" come out as NaN. Take engine.module_state_dict(), or call state_dict() inside {_WHOLE}."
        )

    @property
    def _is_sharded(self) -> bool:
        return any(unit.state is not UnitState.FULL for unit in self._units)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Callable[[], Any], tuple[()]]:
        """Raises: UsageError: a parameter of the module is sharded."""
        if self._is_sharded:
            raise UsageError(
                f"{self._name!r} cannot be copied or pickled: its parameters are sharded, and the copy's would be NaN.",
                do=f"copy it inside {_WHOLE}; or build the model again and load engine.module_state_dict() into it.",
                code="copy-at-rest",
            )
        return _nothing, ()


def _nothing() -> Callable[[nn.Module, str, bool], None]:
    return _do_nothing


def _do_nothing(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    return
