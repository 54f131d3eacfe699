"""``deepspeed.moe.layer``: a mixture of experts, spread over ranks; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class

_DO = "expert parallelism is not built yet: hold all experts on each rank as plain modules, sharded by ZeRO stage 3."

MoE = absent_class("deepspeed.moe.layer.MoE", _DO)

__all__ = ["MoE"]
