"""Functions of DeepSpeed's helper modules that are a few lines each, and one error class."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.comm.world import current_world
from shoal.errors import OptimizerError
from shoal.optim.elementwise import check
from shoal.optim.loss_scale import LossScale, LossScaleSettings

# deepspeed.checkpoint.utils


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure, each tensor with a storage of its own size on ``device``.

    Args:
        item: a tensor, or dicts, lists and tuples of them; anything else is given back as it is.
    """
    if isinstance(item, torch.Tensor):
        moved = item.detach().to(device)
        is_tight = moved.untyped_storage().nbytes() == moved.numel() * moved.element_size()
        return moved if is_tight and moved is not item else moved.clone()
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(value, device) for value in item))
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


# deepspeed.runtime.compiler


def is_compile_supported() -> bool:
    return True


# deepspeed.runtime.fp16.loss_scaler


def LossScaler(scale: float = 1) -> LossScale:
    """A scale that never changes."""
    return LossScale(LossScaleSettings(loss_scale=scale))


# deepspeed.runtime.zero.utils


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Can the optimizer run on shards?"""
    try:
        check(optimizer)
    except OptimizerError:
        return False
    return True


# deepspeed.utils.bwc: values of an ``mpu``, by its newer or older method names


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


# deepspeed.utils.debug


def printflock(*msgs: Any) -> None:
    """Print while holding a lock that the processes of this host share."""
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.stdout.write(" ".join(str(message) for message in msgs) + "\n")
        sys.stdout.flush()


def print_rank0(*msgs: Any, force: bool = False) -> None:
    """Print on rank 0. ``force``: on every rank."""
    if force or current_world().rank == 0:
        printflock(*msgs)


# deepspeed.utils.exceptions


class DeprecatedException(Exception):
    """A feature that DeepSpeed has removed."""


# deepspeed.utils.module_utils


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, parameter or attribute of that dotted name."""
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the module of that dotted name by ``module``."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


# deepspeed.utils.torch


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Is the installed torch within the bounds, both included?"""
    installed = _numbers(torch.__version__)
    low, high = _numbers(min_version), _numbers(max_version)
    return (not low or installed[: len(low)] >= low) and (not high or installed[: len(high)] <= high)


def _numbers(version: Any) -> tuple[int, ...]:
    if version is None:
        return ()
    parts = str(version).partition("+")[0].split(".")
    return tuple(int("".join(letter for letter in part if letter.isdigit()) or 0) for part in parts[:3])


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` once its gradient is accumulated. Returns: the handle."""
    return param.register_post_accumulate_grad_hook(hook)
