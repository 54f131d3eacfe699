"""Constants, functions and classes of DeepSpeed's helper modules that are a few lines each.

Constants whose value is their name are in ``names``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache
from types import TracebackType
from typing import Any

import torch

from shoal.access.engine_parameters import EngineParameters
from shoal.comm.world import current_world
from shoal.compat.accelerator import get_accelerator
from shoal.engine.log import make_audible, say_on_rank_0
from shoal.errors import OptimizerError, UsageError
from shoal.optim.elementwise import check
from shoal.optim.loss_scale import LossScale, LossScaleSettings
from shoal.pipeline.costs import balance
from shoal.running.parameter_owner import OWNERS
from shoal.text import format_bytes, version_numbers

# deepspeed.constants
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"

# deepspeed.launcher.constants
PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024

# deepspeed.runtime.swap_tensor: the smallest tensor that DeepSpeed moves. Shoal's disk tier takes any size.
MIN_SWAPPABLE_BYTES = 1 << 20

# deepspeed.runtime.constants
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"

# deepspeed.checkpoint.constants: keys, and parts of the names of files. Those of AutoEP are not here.
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE, CHECKPOINT_TP_DEGREE = "pp_degree", "tp_degree"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX = "zero_pp_rank_", "_optim_states.pt"
BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_", "fp16_zero_pp_rank_"
LAYER_FILE_PREFIX = "layer_"
FP32_WEIGHT_KEY = "fp32"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4

# deepspeed.runtime.zero.offload_config and deepspeed.runtime.zero.config


class OffloadDeviceEnum(str, Enum):  # noqa: UP042 - its text is the member's, as in DeepSpeed
    """The tier of state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - likewise
    """What ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, Enum):
    """ZeRO's stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of the last, as in DeepSpeed


# deepspeed.runtime.compiler


def is_compile_supported() -> bool:
    return True


# deepspeed.runtime.fp16.loss_scaler


def LossScaler(scale: float = 1) -> LossScale:
    """A scale that never changes."""
    return LossScale(LossScaleSettings(loss_scale=scale))


# deepspeed.runtime.utils


class DummyOptim:
    """The optimizer of a model without one: parameter groups and nothing else."""

    def __init__(self, params: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """The same structure with its tensors on ``device``; with ``criterion_func`` only those for which it is true."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item.to(device) if criterion_func is None and hasattr(item, "to") else item


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force``, log on rank 0 the device memory in use now and at most, after ``message``."""
    if force:
        accelerator = get_accelerator()
        now, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
        say_on_rank_0(current_world().rank, f"{message}: {format_bytes(now)} in use, at most {format_bytes(peak)}")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """torch's, for parameters of no engine. Raises: UsageError: a parameter of an engine, which clips in ``step()``."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(isinstance(OWNERS.get(parameter), EngineParameters) for parameter in given):
        raise UsageError(
            "clip_grad_norm_() was given parameters of an engine, whose gradients are sharded.",
            do="set gradient_clipping in the config; engine.get_global_grad_norm() returns the norm.",
            code="clip-engine",
        )
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)


def get_global_norm(norm_list: Sequence[float | torch.Tensor]) -> float:
    """The norm of several norms."""
    return float(sum(float(norm) ** 2 for norm in norm_list) ** 0.5)


def get_grad_norm(parameters: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the parameters' ``grad``; engines have ``get_global_grad_norm()``."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where each part begins, and the end, so that the heaviest part is as light as it can be.

    >>> partition_balanced([1, 1, 1, 1, 4], 2)
    [0, 4, 5]
    """
    if num_parts >= len(weights):
        return [min(part, len(weights)) for part in range(num_parts + 1)]
    return balance(weights, num_parts)


def empty_cache() -> None:
    get_accelerator().empty_cache()


# deepspeed.runtime.zero.utils


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer can run on shards."""
    try:
        check(optimizer)
    except OptimizerError:
        return False
    return True


# deepspeed.utils.torch


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """True if the installed torch is within the bounds, both included."""
    installed = version_numbers(torch.__version__)
    low, high = (() if bound is None else version_numbers(str(bound)) for bound in (min_version, max_version))
    return (not low or installed[: len(low)] >= low) and (not high or installed[: len(high)] <= high)


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` once its gradient is accumulated. Returns: the handle."""
    return param.register_post_accumulate_grad_hook(hook)


# deepspeed.utils.nvtx


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in a range of its name; on CPU as it is."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        accelerator = get_accelerator()
        accelerator.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return ranged


# deepspeed.utils.init_on_device


class OnDevice:
    """Inside, new tensors are on ``device``, and new floating-point ones have ``dtype`` unless they say otherwise.

    The device "meta" builds a model without memory; ``initialize`` gives it values.
    """

    def __init__(self, dtype: torch.dtype | None, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._context: torch.device | None = None
        self._dtype_before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._dtype_before = torch.get_default_dtype()
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            self._context = torch.device(self.device)
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, trace)
            self._context = None
            torch.set_default_dtype(self._dtype_before)


# deepspeed.utils.logging

# Below Shoal's own: a client that sets its level (Transformers: to WARNING) does not silence Shoal's start-up messages.
logger = logging.getLogger("shoal.deepspeed")

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """A line from the given ranks; None or -1 among them: from all."""
    rank = current_world().rank
    if not ranks or -1 in ranks or rank in ranks:
        make_audible(None)
        logger.log(level, f"[Rank {rank}] {message}")


@cache
def log_dist_once(message: str, ranks: tuple[int, ...] | None = None, level: int = logging.INFO) -> None:
    """As ``log_dist``, once in this process."""
    log_dist(message, ranks, level)


@cache
def warning_once(message: str) -> None:
    """A warning, once in this process."""
    logger.warning(message)


class LogLevelError(UsageError, ValueError):
    """A level that there is not. DeepSpeed raises a ValueError, so it is one too."""


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Raises: LogLevelError: no such level."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise LogLevelError(
            f"{log_level_str!r} is not one of the valid logging levels.", do=f"use one of: {', '.join(log_levels)}."
        )
    (custom_logger or logger).setLevel(level)
