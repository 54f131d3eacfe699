"""``deepspeed.runtime.fp16.loss_scaler``: the loss scale of fp16, under DeepSpeed's names."""

from __future__ import annotations

from shoal.optim.loss_scale import LossScale, LossScaleSettings

LossScalerBase = DynamicLossScaler = LossScale


def LossScaler(scale: float = 1) -> LossScale:
    """A scale that never changes."""
    return LossScale(LossScaleSettings(loss_scale=scale))


__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]
