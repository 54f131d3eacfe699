"""``deepspeed.comm.reduce_op``: torch's reductions."""

from __future__ import annotations

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]
