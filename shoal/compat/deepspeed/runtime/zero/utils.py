"""``deepspeed.runtime.zero.utils``: is this a sharded parameter, is this a known optimizer?"""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import OptimizerError
from shoal.errors import ShoalError as ZeRORuntimeException
from shoal.optim.elementwise import check
from shoal.zero.early import EARLY
from shoal.zero.registry import OWNERS


def is_zero_param(parameter: Any) -> bool:
    """Is it a parameter that ``zero.Init`` or a stage-3 engine has sharded?"""
    if not isinstance(parameter, torch.Tensor):
        return False
    if EARLY.get(parameter) is not None:
        return True
    owner = OWNERS.get(parameter)
    return owner is not None and owner.sharded.unit_of[id(parameter)].is_sharded


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Can it run on shards?"""
    try:
        check(optimizer)
    except OptimizerError:
        return False
    return True


__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
