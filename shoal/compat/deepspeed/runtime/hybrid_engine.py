"""``deepspeed.runtime.hybrid_engine``: an engine with kernels for generating; Shoal has one engine for all."""

from __future__ import annotations

from shoal.compat.absent import absent_class

DeepSpeedHybridEngine = absent_class(
    "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine",
    "train with deepspeed.initialize(), and generate inside deepspeed.zero.unwrap_model_for_generation(engine).",
)

__all__ = ["DeepSpeedHybridEngine"]
