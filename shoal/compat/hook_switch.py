"""Switches the hooks that gather and release units off and on again, under the names that DeepSpeed's clients know.

TRL takes ZeRO-3's hooks off around ``generate``, while it holds all parameters gathered:

    for hook in offload.forward_hooks: hook.remove()
    offload.forward_hooks = []
    ...
    offload._register_deepspeed_module(offload.module)

Here the hooks stay where they are; what the client removes is a handle that switches them off.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.running.hooks import Switch
from shoal.running.order import UnitOrder


class Handle:
    """Stands for all hooks of a model: ``remove()`` switches them off."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def remove(self) -> None:
        self._switch.is_on = False


class Coordinator:
    """The order in which units are used, under DeepSpeed's names.

    It is recorded again when it changes; clients may discard it.
    """

    def __init__(self, order: UnitOrder) -> None:
        self._order = order

    def is_invalid_trace(self) -> bool:
        """True if no order is known."""
        return not self._order.is_known

    def _invalidate_trace(self) -> None:
        self._order.forget()


class ParameterOffload:
    """What DeepSpeed calls ``DeepSpeedZeRoOffload``.

    Args:
        module: the model whose hooks ``switch`` is for.
        order: of its units.
    """

    def __init__(self, module: nn.Module, switch: Switch, order: UnitOrder) -> None:
        self.module = module
        self._switch = switch
        self.param_coordinator = Coordinator(order)
        self.forward_hooks: list[Any] = [Handle(switch)]
        self.backward_hooks: list[Any] = [Handle(switch)]

    def get_param_coordinator(self) -> Coordinator:
        return self.param_coordinator

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """The hooks act again."""
        self._switch.is_on = True
        self.forward_hooks = [Handle(self._switch)]
        self.backward_hooks = [Handle(self._switch)]
