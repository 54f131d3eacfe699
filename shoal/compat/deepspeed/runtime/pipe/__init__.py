"""``deepspeed.runtime.pipe``: pipeline parallelism, which is not built yet."""

from __future__ import annotations

from shoal.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.compat.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
