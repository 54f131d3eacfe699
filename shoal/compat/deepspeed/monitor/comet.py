"""``deepspeed.monitor.comet``: see ``shoal.compat.deepspeed.monitor.writers``."""

from __future__ import annotations

from shoal.compat.deepspeed.monitor.writers import CometMonitor

__all__ = ["CometMonitor"]
