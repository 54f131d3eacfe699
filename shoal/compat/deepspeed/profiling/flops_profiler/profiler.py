"""``deepspeed.profiling.flops_profiler.profiler``: what a model computes, module by module."""

from __future__ import annotations

from shoal.observe.flops_profiler import FlopsProfiler, get_model_profile
from shoal.observe.flops_text import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
