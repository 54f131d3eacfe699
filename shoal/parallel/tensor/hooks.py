"""Hooks on modules around split layers: an input that enters once for several layers, the ends of a stack of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.compiler import untraced
from shoal.parallel.tensor.region import TensorRegion

_INPUT_NAMES = ("hidden_states", "x", "input", "inputs")


class InputHook:
    """A module's input enters the split region once, for all split layers inside.

    Hidden states of an encoder, which cross-attention reads, are copied: they are never split along the sequence.

    Args:
        forks: whether the ranks' random states differ from here to the first row parallel layer inside, or to the
            module's end.
    """

    def __init__(self, name: str, region: TensorRegion, *, forks: bool) -> None:
        self._label = f"{name} in"
        self._region = region
        self._forks = forks

    def __deepcopy__(self, memo: dict[int, Any]) -> InputHook:
        return self

    def register(self, module: nn.Module) -> None:
        """Register the hooks on ``module``."""
        module.register_forward_pre_hook(untraced(self._enter), with_kwargs=True)
        if self._forks:
            module.register_forward_hook(untraced(self._end_fork), always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = replace_input(args, kwargs, lambda x: self._region.enter(x, self._label))
        encoder = kwargs.get("encoder_hidden_states")
        if isinstance(encoder, torch.Tensor):
            kwargs = {**kwargs, "encoder_hidden_states": self._region.copy(encoder, f"{self._label} (encoder)")}
        if self._forks and module.training:
            self._region.fork.begin()
        return args, kwargs

    def _end_fork(self, module: nn.Module, args: Any, output: Any) -> None:
        self._region.fork.end()


class Stack:
    """A list of layers between which activations are split along the sequence.

    Args:
        forks: whether random numbers are drawn between the first layer's input and the last layer's output.
    """

    def __init__(self, name: str, layers: nn.ModuleList, region: TensorRegion, *, forks: bool) -> None:
        self._name = name
        self._layers = layers
        self._region = region
        self._forks = forks

    def __deepcopy__(self, memo: dict[int, Any]) -> Stack:
        return self

    def contains(self, name: str) -> bool:
        """Whether a module or parameter is inside one of the layers."""
        return name.startswith(f"{self._name}.")

    def register(self) -> None:
        """Register the hooks on the first and the last layer."""
        self._layers[0].register_forward_pre_hook(untraced(self._begin), with_kwargs=True)
        self._layers[-1].register_forward_hook(untraced(self._end), always_call=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = replace_input(args, kwargs, lambda x: self._region.split_sequence(x, f"{self._name} in"))
        if self._forks and module.training:
            self._region.fork.begin()
        return args, kwargs

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._region.fork.end()
        if output is None:  # the layer raised an error
            return None
        if isinstance(output, torch.Tensor):
            return self._region.gather_sequence(output, f"{self._name} out")
        return type(output)([self._region.gather_sequence(output[0], f"{self._name} out"), *output[1:]])


def replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first one, or the one called as modules call their input, replaced by ``replace(it)``."""
    if args:
        return (replace(args[0]), *args[1:]), kwargs
    name = next((name for name in _INPUT_NAMES if name in kwargs), next(iter(kwargs)))
    return args, {**kwargs, name: replace(kwargs[name])}
