"""``deepspeed.runtime.fp16.unfused_optimizer``: the class of optimizers over 16-bit parameters at stage 0."""

from __future__ import annotations

from shoal.compat.by_stage import kind, stage_of

FP16_UnfusedOptimizer = kind(
    "FP16_UnfusedOptimizer",
    "An optimizer of fp16 or bf16 parameters at stage 0.",
    lambda optimizer: optimizer.low_precision_dtype is not None and stage_of(optimizer) == 0,
)

__all__ = ["FP16_UnfusedOptimizer"]
