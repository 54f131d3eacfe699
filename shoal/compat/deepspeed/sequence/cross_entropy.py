"""``deepspeed.sequence.cross_entropy``: the loss over sequences in parts; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_function

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

vocab_sequence_parallel_cross_entropy = absent_function(
    "deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy", _DO
)
vocab_parallel_cross_entropy = absent_function("deepspeed.sequence.cross_entropy.vocab_parallel_cross_entropy", _DO)

__all__ = ["vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]
