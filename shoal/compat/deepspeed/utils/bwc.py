"""``deepspeed.utils.bwc``: what an ``mpu`` says, by its newer or older method names."""

from __future__ import annotations

from typing import Any


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank's number among the tensor-parallel ones; 0 without an mpu."""
    return int(_ask(mpu, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Tensor-parallel ranks; 1 without an mpu."""
    return int(_ask(mpu, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """The group of the tensor-parallel ranks; None without an mpu."""
    return _ask(mpu, "group", None)


def _ask(mpu: Any, what: str, without: Any) -> Any:
    for name in (f"get_tensor_model_parallel_{what}", f"get_slice_parallel_{what}", f"get_model_parallel_{what}"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return without


__all__ = [
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]
