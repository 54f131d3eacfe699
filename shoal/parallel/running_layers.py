"""Which layers of a list a forward runs: a pipeline stage runs the whole model's forward with some of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_BEGINS: ContextVar[Mapping[int, int] | None] = ContextVar("first running layers", default=None)  # by id of the list


def first_running(layers: nn.Module) -> int:
    """The place in the list of the first layer that runs now: above 0, the layers before it run on other ranks."""
    return (_BEGINS.get() or {}).get(id(layers), 0)


@contextmanager
def running_from(layers: nn.Module, begin: int) -> Iterator[None]:
    """Inside the block a forward runs the layers from ``begin`` on."""
    token = _BEGINS.set({**(_BEGINS.get() or {}), id(layers): begin})
    try:
        yield
    finally:
        _BEGINS.reset(token)
