"""``deepspeed.runtime.pipe.engine``: the engine of a pipeline; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "pipeline parallelism is not built yet: train the same layers as one nn.Sequential with ZeRO stage 3."

PipelineEngine = absent_class("deepspeed.runtime.pipe.engine.PipelineEngine", _DO)

__all__ = ["PipelineEngine"]
