"""``deepspeed.runtime.zero.partition_parameters``: building a model sharded, and names that clients look up."""

from __future__ import annotations

from enum import Enum

import torch

from shoal.compat.accelerator import get_accelerator
from shoal.compat.parameters import ZeroParamStatus
from shoal.compat.parameters import is_zero_parameter as is_zero_param
from shoal.compat.zero_init import Init, zero_wrapper_for_fp_tensor_constructor
from shoal.zero import GatheredParameters, register_external_parameter, unregister_external_parameter


class ZeroParamType(Enum):
    """Whether a parameter is gathered, sharded, or sharded on other ranks."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DeepSpeedTensorOverride(Enum):
    """The kinds of tensors whose dtype ``zero.Init`` may change."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]

_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn


__all__ = [
    "DEFAULT_TENSOR_OVERRIDES",
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
