"""The one accelerator of this process: torch's, or the CPU."""

from __future__ import annotations

from functools import cache

import torch

from shoal.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from shoal.errors import UsageError

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """What torch finds, or the CPU. Found once."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return DeepSpeedAccelerator(found.type if found is not None else "cpu")


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Raises: UsageError: it is not the accelerator that torch computes on."""
    if accel_obj is not get_accelerator():
        raise UsageError(
            f"set_accelerator({accel_obj!r}): Shoal computes on torch's own accelerator, {get_accelerator()!r}.",
            do="leave it out; hide the devices (CUDA_VISIBLE_DEVICES=) to compute on the CPU.",
            code="accelerator",
        )


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
