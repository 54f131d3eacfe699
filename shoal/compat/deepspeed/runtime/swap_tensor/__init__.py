"""``deepspeed.runtime.swap_tensor``: the smallest tensor that DeepSpeed swaps. Shoal's disk tier takes any size."""

from __future__ import annotations

MIN_SWAPPABLE_BYTES = 1 << 20

__all__ = ["MIN_SWAPPABLE_BYTES"]
