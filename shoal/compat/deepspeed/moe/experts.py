"""``deepspeed.moe.experts``: the experts of a rank; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "expert parallelism is not built yet: hold all experts on each rank as plain modules, sharded by ZeRO stage 3."

Experts = absent_class("deepspeed.moe.experts.Experts", _DO)

__all__ = ["Experts"]
