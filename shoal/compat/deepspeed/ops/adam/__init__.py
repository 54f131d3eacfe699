"""``deepspeed.ops.adam``: Adam and AdamW, torch's own with DeepSpeed's signatures."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from shoal.compat.deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
