"""``deepspeed.zero``: sharded construction, gathering, and the statuses of a parameter."""

from __future__ import annotations

from shoal.compat.deepspeed.runtime.zero.partition_parameters import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from shoal.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from shoal.compat.table_finder import submodules_of
from shoal.compat.zero_init import Init as MiCS_Init
from shoal.compat.zero_init import unwrap_model_for_generation
from shoal.running.hook_switch import ParameterOffload as DeepSpeedZeRoOffload

__getattr__ = submodules_of(__name__)

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
