"""``deepspeed.zero``: sharded construction, gathering, and the statuses of a parameter."""

from __future__ import annotations

from shoal.compat.deepspeed.runtime.zero.mics import MiCS_Init
from shoal.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from shoal.compat.deepspeed.runtime.zero.partition_parameters import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from shoal.compat.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from shoal.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
