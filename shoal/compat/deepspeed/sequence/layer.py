"""``deepspeed.sequence.layer``: attention over sequences in parts; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

DistributedAttention = absent_class("deepspeed.sequence.layer.DistributedAttention", _DO)
single_all_to_all = absent_function("deepspeed.sequence.layer.single_all_to_all", _DO)

__all__ = ["DistributedAttention", "single_all_to_all"]
