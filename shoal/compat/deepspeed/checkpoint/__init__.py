"""``deepspeed.checkpoint``: helpers around checkpoints. Reading DeepSpeed's own is `shoal convert`'s."""

from __future__ import annotations

from shoal.compat.absent import absent_class

DeepSpeedCheckpoint = absent_class(
    "deepspeed.checkpoint.DeepSpeedCheckpoint",
    "read a DeepSpeed checkpoint by `shoal convert`, or by engine.load_checkpoint(): any layout loads in any other.",
)

__all__ = ["DeepSpeedCheckpoint"]
