"""``deepspeed.runtime.zero.parameter_offload``: what gathers and releases parameters; here the engine itself."""

from __future__ import annotations

from shoal.compat.absent import absent_class

DeepSpeedZeRoOffload = absent_class(
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload",
    "call deepspeed.initialize() without an optimizer: at stage 3 such an engine gathers and releases.",
)

__all__ = ["DeepSpeedZeRoOffload"]
