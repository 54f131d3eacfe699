"""``deepspeed.runtime.zero.tiling``: a linear layer in tiles; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "use torch.nn.Linear; a large one is a unit of its own, sharded at stage 3."

TiledLinear = absent_class("deepspeed.zero.TiledLinear", _DO)
TiledLinearReturnBias = absent_class("deepspeed.zero.TiledLinearReturnBias", _DO)

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
