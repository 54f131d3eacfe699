"""``deepspeed.monitor``: values over steps."""

from __future__ import annotations

from shoal.compat.table_finder import submodules_of

__getattr__ = submodules_of(__name__)
