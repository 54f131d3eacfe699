"""``deepspeed.runtime.zero.parameter_offload``: the switch of the hooks that gather and release parameters."""

from __future__ import annotations

from shoal.zero.hook_switch import ParameterOffload as DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
