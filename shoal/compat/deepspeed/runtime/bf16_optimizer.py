"""``deepspeed.runtime.bf16_optimizer``: the class of optimizers over bf16 parameters."""

from __future__ import annotations

import torch

from shoal.compat.by_stage import has_dtype, kind, stage_of

BF16_Optimizer = kind(
    "BF16_Optimizer",
    "An optimizer of bf16 parameters below stage 2.",
    lambda optimizer: has_dtype(optimizer, torch.bfloat16) and stage_of(optimizer) < 2,
)

__all__ = ["BF16_Optimizer"]
