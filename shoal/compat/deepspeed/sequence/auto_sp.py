"""``deepspeed.sequence.auto_sp``: sequence parallelism found in a model; not built yet."""

from __future__ import annotations

from shoal.compat.absent import absent_function

_DO = (
    "sequence parallelism is not built yet: use activation checkpointing for long sequences, or a smaller micro-batch."
)

auto_wrap_model_for_sp = absent_function("deepspeed.sequence.auto_sp.auto_wrap_model_for_sp", _DO)

__all__ = ["auto_wrap_model_for_sp"]
