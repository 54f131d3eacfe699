"""``deepspeed.moe.mappings``: tokens that tensor-parallel ranks share; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_function

_DO = "expert parallelism is not built yet: hold all experts on each rank as plain modules, sharded by ZeRO stage 3."

gather_tokens = absent_function("deepspeed.moe.mappings.gather_tokens", _DO)
drop_tokens = absent_function("deepspeed.moe.mappings.drop_tokens", _DO)

__all__ = ["drop_tokens", "gather_tokens"]
