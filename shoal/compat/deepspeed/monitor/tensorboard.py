"""``deepspeed.monitor.tensorboard``: see ``shoal.compat.deepspeed.monitor.writers``."""

from __future__ import annotations

from shoal.compat.deepspeed.monitor.writers import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
