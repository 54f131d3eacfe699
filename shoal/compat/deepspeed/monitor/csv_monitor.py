"""``deepspeed.monitor.csv_monitor``: see ``shoal.compat.deepspeed.monitor.writers``."""

from __future__ import annotations

from shoal.compat.deepspeed.monitor.writers import csvMonitor

__all__ = ["csvMonitor"]
