"""``deepspeed.runtime.pipe.module``: a model as a list of layers; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "pipeline parallelism is not built yet: train the same layers as one nn.Sequential with ZeRO stage 3."

PipelineModule = absent_class("deepspeed.runtime.pipe.module.PipelineModule", _DO)
LayerSpec = absent_class("deepspeed.runtime.pipe.module.LayerSpec", _DO)
TiedLayerSpec = absent_class("deepspeed.runtime.pipe.module.TiedLayerSpec", _DO)
PipelineError = absent_class("deepspeed.runtime.pipe.module.PipelineError", _DO)

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]
