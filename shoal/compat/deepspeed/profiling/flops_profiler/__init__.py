"""``deepspeed.profiling.flops_profiler``: what a model computes, module by module."""

from __future__ import annotations

from shoal.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
