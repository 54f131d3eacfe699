"""``deepspeed.runtime.pipe.topology``: which rank is which stage; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "pipeline parallelism is not built yet: train the same layers as one nn.Sequential with ZeRO stage 3."

ProcessTopology = absent_class("deepspeed.runtime.pipe.topology.ProcessTopology", _DO)
PipeDataParallelTopology = absent_class("deepspeed.runtime.pipe.topology.PipeDataParallelTopology", _DO)
PipeModelDataParallelTopology = absent_class("deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology", _DO)
PipelineParallelGrid = absent_class("deepspeed.runtime.pipe.topology.PipelineParallelGrid", _DO)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
