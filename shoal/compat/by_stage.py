"""DeepSpeed's optimizer classes of a stage or precision; ``isinstance`` finds the one wrapper that does as much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.compat.absent import not_built
from shoal.compat.optimizer import DeepSpeedShardedOptimizer as ShardedOptimizer
from shoal.compat.optimizer import config_of
from shoal.running.parameter_owner import OWNERS


class _Kind(type):
    """A class whose instances are the wrappers for which ``fits`` is true."""

    fits: Callable[[ShardedOptimizer], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedOptimizer) and cls.fits(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_built(f"{cls.__name__}(...)", "call deepspeed.initialize(): it makes the wrapper.")


def kind(name: str, doc: str, fits: Callable[[ShardedOptimizer], bool]) -> type:
    """A class of that name for ``isinstance``. Calling it raises NotBuiltError."""
    return _Kind(name, (), {"__doc__": doc, "fits": staticmethod(fits)})


def stage_of(optimizer: ShardedOptimizer) -> int:
    """The ZeRO stage of the wrapper's engine; 0 after that engine was destroyed."""
    owner = OWNERS.get(optimizer.sharded_step.groups[0].parameters[0])
    return 0 if owner is None else owner.stage


def has_dtype(optimizer: ShardedOptimizer, dtype: torch.dtype) -> bool:
    """True if the wrapper updates parameters of that format."""
    return any(group.buffer.dtype == dtype for group in optimizer.sharded_step.groups)


def take_class(optimizer: ShardedOptimizer) -> None:
    """``isinstance`` finds the wrapped optimizer's class too: DeepSpeed wraps nothing at stage 0 in fp32.

    A class made of the two, since clients derive from ``optimizer.__class__``, whose ``step()`` must stay the engine's.
    """
    wrapped = type(optimizer.optimizer)
    optimizer.__class__ = type(f"Sharded{wrapped.__name__}", (ShardedOptimizer, wrapped), {})


def _is_bf16_wrapper(optimizer: ShardedOptimizer) -> bool:
    """bf16 parameters at stage 1 whose gradients the config has summed in fp32: a class of its own in DeepSpeed."""
    config = config_of(optimizer)
    is_asked_for = config is not None and config.data_types.grad_accum_dtype == "fp32"
    return is_asked_for and stage_of(optimizer) == 1 and has_dtype(optimizer, torch.bfloat16)


DeepSpeedZeroOptimizer = kind(
    "DeepSpeedZeroOptimizer",
    "An optimizer at stage 1 or 2.",
    lambda optimizer: stage_of(optimizer) in (1, 2) and not _is_bf16_wrapper(optimizer),
)
DeepSpeedZeroOptimizer_Stage3 = kind(
    "DeepSpeedZeroOptimizer_Stage3", "An optimizer at stage 3.", lambda optimizer: stage_of(optimizer) == 3
)
BF16_Optimizer = kind(
    "BF16_Optimizer",
    "An optimizer of bf16 parameters at stage 1 with data_types.grad_accum_dtype fp32.",
    _is_bf16_wrapper,
)
FP16_Optimizer = kind(
    "FP16_Optimizer",
    "An optimizer of fp16 parameters at stage 0.",
    lambda optimizer: has_dtype(optimizer, torch.float16) and stage_of(optimizer) == 0,
)
FP16_UnfusedOptimizer = kind(
    "FP16_UnfusedOptimizer",
    "An optimizer of fp16 or bf16 parameters at stage 0.",
    lambda optimizer: optimizer.low_precision_dtype is not None and stage_of(optimizer) == 0,
)
