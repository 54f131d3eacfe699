"""``deepspeed.profiling.flops_profiler.profiler``: counting FLOPs; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = "use torch.profiler or torch.utils.flop_counter.FlopCounterMode, which counts a module's FLOPs."

FlopsProfiler = absent_class("deepspeed.profiling.flops_profiler.profiler.FlopsProfiler", _DO)
get_model_profile = absent_function("deepspeed.profiling.flops_profiler.profiler.get_model_profile", _DO)

__all__ = ["FlopsProfiler", "get_model_profile"]
