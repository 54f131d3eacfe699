"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights out of a checkpoint, in one process."""

from __future__ import annotations

from shoal.compat.absent import absent_function

_DO = "run `shoal convert CHECKPOINT OUT`."

get_fp32_state_dict_from_zero_checkpoint = absent_function("get_fp32_state_dict_from_zero_checkpoint", _DO)
convert_zero_checkpoint_to_fp32_state_dict = absent_function("convert_zero_checkpoint_to_fp32_state_dict", _DO)
load_state_dict_from_zero_checkpoint = absent_function("load_state_dict_from_zero_checkpoint", _DO)
get_model_state_file = absent_function("get_model_state_file", _DO)
get_optim_files = absent_function("get_optim_files", _DO)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]
