"""``deepspeed.runtime.zero.partition_parameters``: building a model sharded, and names that clients look up."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from shoal.compat.deepspeed.accelerator import get_accelerator
from shoal.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter


class ZeroParamType(Enum):
    """Where a parameter lives: whole, in parts, or in parts elsewhere."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Is a parameter whole on this rank?"""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class DeepSpeedTensorOverride(Enum):
    """What ``zero.Init`` may change of a new tensor."""

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


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Callable[..., torch.Tensor]:
    """A constructor of tensors whose floating-point results have a dtype and a device.

    Args:
        fn: one of the ``_orig_torch_*`` above.
        target_fp_dtype, target_device: None: as torch chooses; a device that the caller names wins.
    """

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is not None and made.is_floating_point():
            made.data = made.data.to(target_fp_dtype)
        return made

    return construct


__all__ = [
    "DEFAULT_TENSOR_OVERRIDES",
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
