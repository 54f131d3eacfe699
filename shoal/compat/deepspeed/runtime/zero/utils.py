"""``deepspeed.runtime.zero.utils``: is this a sharded parameter, is this a known optimizer?"""

from __future__ import annotations

import torch

from shoal.compat.parameters import is_zero_parameter as is_zero_param
from shoal.errors import OptimizerError
from shoal.errors import ShoalError as ZeRORuntimeException
from shoal.optim.elementwise import check


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Can it run on shards?"""
    try:
        check(optimizer)
    except OptimizerError:
        return False
    return True


__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
