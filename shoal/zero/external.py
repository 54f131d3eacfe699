"""Finds parameters that are read outside their own unit's forward, in the first passes.

A tied head that computes ``x @ embedding.weight.T`` reads another unit's parameter. At rest that parameter is a
stand-in: it is seen as it enters a torch function, its unit is gathered, and whoever runs then remembers it, so later
passes gather both.
Source: the same need is met by ``register_external_parameter`` in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from shoal.sharding.unit import Unit
from shoal.zero.touch import DATA_ACCESS, TouchMode


def external_use(unit_of: dict[int, Unit], on_use: Callable[[Unit], None]) -> TouchMode:
    """While active, a parameter at rest that enters a torch function is gathered first.

    Args:
        unit_of: unit by ``id`` of a parameter.
        on_use: called with a unit that is at rest and about to be read.
    """

    def touched(parameter: nn.Parameter) -> None:
        unit = unit_of.get(id(parameter))
        if unit is not None and unit.is_released:
            on_use(unit)

    return TouchMode(touched, leave_out=DATA_ACCESS)


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
