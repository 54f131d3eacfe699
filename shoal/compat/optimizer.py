"""DeepSpeed's names on the optimizer that ``initialize`` returns; its classes of a stage or precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.compat.absent import not_built
from shoal.compat.hook_switch import ParameterOffload
from shoal.config import Config
from shoal.engine.engine import Engine
from shoal.optim.loss_scale import LossScaleSettings
from shoal.running.optimizer import LastStep, ShardedOptimizer
from shoal.running.parameter_owner import OWNERS, ParameterOwner


def _owner_of(optimizer: ShardedOptimizer) -> ParameterOwner | None:
    return OWNERS.get(optimizer.sharded_step.groups[0].parameters[0])


def config_of(optimizer: ShardedOptimizer) -> Config | None:
    """The config of the optimizer's engine; None once that is gone."""
    engine = getattr(_owner_of(optimizer), "engine", None)
    return engine.properties.config if isinstance(engine, Engine) else None


class DeepSpeedOptimizer:
    """The base of every optimizer that ``initialize`` returns, under DeepSpeed's name: clients ask ``isinstance``."""


class LossScaler:
    """A loss scale under the names of DeepSpeed's ``LossScaler``."""

    def __init__(self, status: LastStep) -> None:
        self._status = status

    @property
    def cur_scale(self) -> float:
        return self._status.loss_scale

    @property
    def dynamic(self) -> bool:
        return self._status.is_dynamic

    loss_scale, dynamic_loss_scale = cur_scale, dynamic

    @property
    def cur_iter(self) -> int:
        return self._status.scaler.iteration if self._status.scaler is not None else 0

    @property
    def scale_window(self) -> int | None:
        return self._dynamic.loss_scale_window if self._dynamic else None

    @property
    def min_loss_scale(self) -> float | None:
        return self._dynamic.min_loss_scale if self._dynamic else None

    @property
    def _dynamic(self) -> LossScaleSettings | None:
        scaler = self._status.scaler
        return scaler.settings if scaler is not None and self._status.is_dynamic else None


class DeepSpeedShardedOptimizer(DeepSpeedOptimizer, ShardedOptimizer):
    """The sharded optimizer with DeepSpeed's names: that of a ``DeepSpeedEngine``."""

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name for ``loss_scale``."""
        return self.loss_scale

    def needs_scaler(self) -> bool:
        """True if the loss must be scaled before backward (``engine.backward`` and ``engine.scale`` do so)."""
        return self._status.scaler is not None

    @property
    def loss_scaler(self) -> LossScaler:
        """DeepSpeed's view of the loss scale, to read."""
        return LossScaler(self._status)

    loss_scale_config = loss_scaler  # DeepSpeed's name of it at stage 0

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale is dynamic."""
        return self._status.is_dynamic

    @property
    def clip_grad(self) -> float:
        """``gradient_clipping``, the largest global norm; 0: gradients are not clipped."""
        config = config_of(self)
        return 0.0 if config is None else config.gradient_clipping

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The switch of the hooks that gather and release parameters: clients ask ``hasattr`` for it at stage 3.

        Raises: AttributeError: below stage 3, as in DeepSpeed, and after the engine was destroyed.
        """
        engine: Any = getattr(_owner_of(self), "engine", None)
        if engine is None or stage_of(self) != 3:
            raise AttributeError("parameter_offload is of an engine at ZeRO stage 3")
        offload: ParameterOffload = engine.parameter_offload
        return offload

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's fp32 main parameters, as 1-D ranges, in the order of groups. Stages 0 to 2 in DeepSpeed."""
        parts = [part for group in self.sharded_step.groups for part in group.ranges]
        return [part.param for part in sorted(parts, key=lambda part: part.group)]

    fp32_groups_flat = single_partition_of_fp32_groups  # at stage 0
    fp32_partitioned_groups_flat = single_partition_of_fp32_groups  # at stage 3

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """This rank's fp32 main parameters by group, 1-D, one per parameter: DeepSpeed's name of it at stage 0."""
        ranges = [part for group in self.sharded_step.groups for part in group.ranges]
        return [
            [part.param[s.start : s.stop] for part in ranges if part.group == index for s in part.segments]
            for index in range(len(self.param_groups))
        ]

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the reduced gradients, 1-D, fp32, in the order of each group's parameters.

        DeepSpeed's name. A part has no elements where this rank owns none; parameters without a gradient are left out.
        """
        gradients = {
            index: [self._local_gradient(parameter) for parameter in group["params"]]
            for index, group in enumerate(self.param_groups)
        }
        return {index: [part for part in parts if part is not None] for index, parts in gradients.items()}


class _Kind(type):
    """A class whose instances are the wrappers for which ``fits`` is true."""

    fits: Callable[[DeepSpeedShardedOptimizer], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, DeepSpeedShardedOptimizer) and cls.fits(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_built(f"{cls.__name__}(...)", "call deepspeed.initialize(): it makes the wrapper.")


def kind(name: str, doc: str, fits: Callable[[DeepSpeedShardedOptimizer], bool]) -> type:
    """A class of that name for ``isinstance``. Calling it raises NotBuiltError."""
    return _Kind(name, (), {"__doc__": doc, "fits": staticmethod(fits)})


def stage_of(optimizer: DeepSpeedShardedOptimizer) -> int:
    """The ZeRO stage of the wrapper's engine; 0 after that engine was destroyed."""
    owner = _owner_of(optimizer)
    return 0 if owner is None else owner.stage


def has_dtype(optimizer: DeepSpeedShardedOptimizer, dtype: torch.dtype) -> bool:
    """True if the wrapper updates parameters of that format."""
    return any(group.buffer.dtype == dtype for group in optimizer.sharded_step.groups)


def take_class(optimizer: DeepSpeedShardedOptimizer) -> None:
    """``isinstance`` finds the wrapped optimizer's class too: DeepSpeed wraps nothing at stage 0 in fp32.

    A class made of the two, since clients derive from ``optimizer.__class__``, whose ``step()`` must stay the engine's.
    """
    wrapped = type(optimizer.optimizer)
    optimizer.__class__ = type(f"Sharded{wrapped.__name__}", (DeepSpeedShardedOptimizer, wrapped), {})


def _is_bf16_wrapper(optimizer: DeepSpeedShardedOptimizer) -> bool:
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
