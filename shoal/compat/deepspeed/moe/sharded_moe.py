"""``deepspeed.moe.sharded_moe``: gates, and the way to the experts; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = "expert parallelism is not built yet: hold all experts on each rank as plain modules, sharded by ZeRO stage 3."

TopKGate = absent_class("deepspeed.moe.sharded_moe.TopKGate", _DO)
MOELayer = absent_class("deepspeed.moe.sharded_moe.MOELayer", _DO)
top1gating = absent_function("deepspeed.moe.sharded_moe.top1gating", _DO)
top2gating = absent_function("deepspeed.moe.sharded_moe.top2gating", _DO)
topkgating = absent_function("deepspeed.moe.sharded_moe.topkgating", _DO)

__all__ = ["MOELayer", "TopKGate", "top1gating", "top2gating", "topkgating"]
