"""``deepspeed.ops.aio``: the builder of file reads and writes; Shoal's disk tier has its own."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
