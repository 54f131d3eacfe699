"""``deepspeed.runtime.zero.config``: the section ``zero_optimization``, and the stages by name."""

from __future__ import annotations

from enum import Enum

from shoal.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from shoal.config.zero import ZeroOptimization as DeepSpeedZeroConfig

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """ZeRO's stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of the last, as in DeepSpeed


__all__ = ["DeepSpeedZeroConfig", "OffloadDeviceEnum", "ZERO_OPTIMIZATION", "ZeroStageEnum"]
