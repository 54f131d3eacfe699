"""``deepspeed.ops.adagrad``: Adagrad, torch's own with DeepSpeed's signature."""

from __future__ import annotations

from shoal.compat.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
