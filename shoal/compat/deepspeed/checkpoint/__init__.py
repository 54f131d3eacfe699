"""``deepspeed.checkpoint``: helpers around checkpoints. Reading DeepSpeed's own is engine.load_checkpoint()'s."""

from __future__ import annotations

from shoal.compat.absent import absent_class, absent_function
from shoal.compat.deepspeed.checkpoint import constants
from shoal.compat.deepspeed.checkpoint.constants import *  # noqa: F403  # all of __all__ below
from shoal.compat.deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from shoal.compat.deepspeed.checkpoint.universal_checkpoint import SubparamShape, enable_universal_checkpoint
from shoal.compat.small_functions import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

_DO = "engine.load_checkpoint() and `shoal convert` read DeepSpeed's checkpoints: any layout loads in any other."

ZeROCheckpoint = absent_class("deepspeed.checkpoint.ZeROCheckpoint", _DO)
get_model_3d_descriptor = absent_function("deepspeed.checkpoint.get_model_3d_descriptor", _DO)
merge_state = absent_function("deepspeed.checkpoint.merge_state", _DO)
model_3d_desc = absent_function("deepspeed.checkpoint.model_3d_desc", _DO)
reshape_meg_2d_parallel = absent_function("deepspeed.checkpoint.reshape_meg_2d_parallel", _DO)

__all__ = [
    "DeepSpeedCheckpoint",
    "SubparamShape",
    "ZeROCheckpoint",
    "enable_universal_checkpoint",
    "get_layer_ckpt_name_for_rank",
    "get_model_3d_descriptor",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "merge_state",
    "model_3d_desc",
    "reshape_meg_2d_parallel",
    *constants.__all__,
]
