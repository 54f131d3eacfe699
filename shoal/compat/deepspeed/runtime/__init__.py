"""``deepspeed.runtime``: the engine and what belongs to it."""

from __future__ import annotations

from shoal.compat.table_finder import submodules_of

__getattr__ = submodules_of(__name__)
