"""``deepspeed.constants``: values that scripts import."""

from __future__ import annotations

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"

__all__ = ["CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK", "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]
