"""``deepspeed.runtime.fp16.unfused_optimizer``: the class of optimizers over fp16 parameters at stage 0."""

from __future__ import annotations

import torch

from shoal.compat.by_stage import has_dtype, kind, stage_of

FP16_UnfusedOptimizer = kind(
    "FP16_UnfusedOptimizer",
    "An optimizer of fp16 parameters at stage 0.",
    lambda optimizer: has_dtype(optimizer, torch.float16) and stage_of(optimizer) == 0,
)

__all__ = ["FP16_UnfusedOptimizer"]
