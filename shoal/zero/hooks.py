"""The hooks on modules and on autograd: each calls a verb of the runtime.

All handles are kept; ``detach`` gives the model back as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.compiler import untraced
from shoal.sharding.unit import Unit
from shoal.zero.hook_switch import Switch
from shoal.zero.state_dict_hook import AtRestHook, Notice


class Runtime(Protocol):
    def before_model(self) -> None: ...
    def after_model(self, output: Any) -> None: ...
    def before_forward(self, unit: Unit) -> None: ...
    def after_forward(self, unit: Unit, inputs: Any, output: Any) -> None: ...
    def gradient_ready(self, unit: Unit, index: int) -> None: ...


class HookSet:
    """Every hook that Shoal has on one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
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
        def ready(_parameter: torch.Tensor) -> None:
            runtime.gradient_ready(unit, index)

        self._handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def on_state_dict(self, model: nn.Module, sharded_of: Mapping[int, Unit]) -> None:
        """``sharded_of``: the sharded unit by ``id`` of a parameter."""
        notice = Notice()
        for name, module in model.named_modules():
            own = [sharded_of[id(p)] for p in module._parameters.values() if id(p) in sharded_of]
            if own:
                hook = AtRestHook(name, module, list(dict.fromkeys(own)), notice)
                self._handles.append(module.register_state_dict_pre_hook(hook))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def accumulates_into(parameters: Iterable[nn.Parameter]) -> bool:
    """Will the backward pass that runs in this thread accumulate a gradient into some of these parameters?

    ``autograd.grad`` on inputs will not.
    """
    for parameter in parameters:
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
