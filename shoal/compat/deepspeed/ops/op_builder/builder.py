"""``deepspeed.ops.op_builder.builder``: the base of the builders."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.op_builder import CUDAOpBuilder, OpBuilder

__all__ = ["CUDAOpBuilder", "OpBuilder"]
