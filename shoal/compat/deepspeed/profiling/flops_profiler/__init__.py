"""``deepspeed.profiling.flops_profiler``: counting FLOPs, which is not built yet."""

from __future__ import annotations

from shoal.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
