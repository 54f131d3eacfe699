"""``deepspeed.ops.lion``: Lion, Shoal's own with DeepSpeed's signatures."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from shoal.compat.deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
