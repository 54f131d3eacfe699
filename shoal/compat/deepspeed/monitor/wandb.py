"""``deepspeed.monitor.wandb``: see ``shoal.compat.deepspeed.monitor.writers``."""

from __future__ import annotations

from shoal.compat.deepspeed.monitor.writers import WandbMonitor

__all__ = ["WandbMonitor"]
