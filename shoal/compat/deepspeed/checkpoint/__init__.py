"""``deepspeed.checkpoint``: helpers around checkpoints. Reading DeepSpeed's own is `shoal convert`'s."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function

_DO = "read a DeepSpeed checkpoint by `shoal convert`, or by engine.load_checkpoint(): any layout loads in any other."

DeepSpeedCheckpoint = absent_class("deepspeed.checkpoint.DeepSpeedCheckpoint", _DO)
ZeROCheckpoint = absent_class("deepspeed.checkpoint.ZeROCheckpoint", _DO)
enable_universal_checkpoint = absent_function("deepspeed.checkpoint.enable_universal_checkpoint", _DO)
get_model_3d_descriptor = absent_function("deepspeed.checkpoint.get_model_3d_descriptor", _DO)
model_3d_desc = absent_function("deepspeed.checkpoint.model_3d_desc", _DO)
reshape_meg_2d_parallel = absent_function("deepspeed.checkpoint.reshape_meg_2d_parallel", _DO)

__all__ = [
    "DeepSpeedCheckpoint",
    "ZeROCheckpoint",
    "enable_universal_checkpoint",
    "get_model_3d_descriptor",
    "model_3d_desc",
    "reshape_meg_2d_parallel",
]
