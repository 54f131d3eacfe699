"""``deepspeed.ops.lamb``: LAMB, Shoal's own with DeepSpeed's signature."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
