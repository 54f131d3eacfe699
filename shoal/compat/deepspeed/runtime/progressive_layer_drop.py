"""``deepspeed.runtime.progressive_layer_drop``: the share of layers kept, by the step."""

from __future__ import annotations

from shoal.models.layer_drop import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
