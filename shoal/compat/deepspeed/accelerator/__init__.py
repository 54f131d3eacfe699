"""The accelerator of this machine under DeepSpeed's names."""

from __future__ import annotations

from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.compat.deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
