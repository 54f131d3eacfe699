"""``deepspeed.runtime.zero.mics``: building a model for hybrid sharding; the same as for stage 3."""

from __future__ import annotations

from shoal.compat.zero_init import Init as MiCS_Init

__all__ = ["MiCS_Init"]
