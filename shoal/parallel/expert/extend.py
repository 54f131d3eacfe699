"""A module keeps its place and its parameters and gets another ``forward``: its class becomes a subclass of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

from torch import nn


def extend(module: nn.Module, behaviour: type[nn.Module], **attributes: object) -> None:
    """Give a module the ``forward`` of ``behaviour``, and attributes.

    The class keeps its name, by which rules of units and recomputation find modules, and ``isinstance`` its answers.
    """
    module.__class__ = _extended(type(module), behaviour)
    for name, value in attributes.items():
        setattr(module, name, value)


def _extend(base: type[nn.Module], behaviour: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (behaviour, base), names)


_extended = cast(Callable[[type[nn.Module], type[nn.Module]], type[nn.Module]], cache(_extend))
