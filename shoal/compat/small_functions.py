"""Constants, functions and classes of DeepSpeed's helper modules that are a few lines each.

Constants whose value is their name are in ``names``.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.access.engine_parameters import EngineParameters
from shoal.comm.world import current_world
from shoal.compat.accelerator import get_accelerator
from shoal.compat.config_models import OffloadStateTypeEnum
from shoal.compat.parameters import part_of
from shoal.engine.engine import Engine
from shoal.engine.log import make_audible, say_on_rank_0
from shoal.errors import ConfigError, OptimizerError, UsageError
from shoal.optim.elementwise import check
from shoal.optim.loss_scale import LossScale, LossScaleSettings
from shoal.pipeline.costs import balance
from shoal.running.parameter_owner import OWNERS
from shoal.text import format_bytes, version_numbers
from shoal.zero import safe_get_local_fp32_param, safe_get_local_optimizer_state

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

# deepspeed.runtime.compiler


def is_compile_supported() -> bool:
    return True


# deepspeed.runtime.dataloader


class RepeatingLoader:
    """Starts the loader again when it ends. Raises: StopIteration: the loader has no batch at all."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


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


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool]) -> Any:
    """As ``move_to_device``, and tensors that are there already are copied."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device) if criterion_func(item) else item
    if isinstance(item, dict):
        return {key: copy_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(copy_to_device(value, device, criterion_func) for value in item)
    return item


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


def mask_nan_or_inf_with_val_inplace(input: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace values that are not finite by ``val``."""
    input.masked_fill_(~input.isfinite(), val)


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


def prefix_sum_inc(weights: Sequence[int]) -> list[int]:
    """The sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def is_model_parallel_parameter(p: Any) -> bool:
    """True if it is marked as one part of a tensor-parallel parameter."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    get_accelerator().empty_cache()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text.

    >>> call_to_str("f", 1, b=2)
    'f(1, b=2)'
    """
    given = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The one value of ``items``. Raises: UsageError: there are several, or none."""
    values = set(items)
    if len(values) != 1:
        raise UsageError(f"expected one value, got {len(values)}: {sorted(map(str, values))[:5]}.", code="not-unique")
    return values.pop()


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


# deepspeed.runtime.zero.offload_states


def get_state_devices(model: Engine, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that this rank's part of a kind of state lies on; where it has none, where it would lie."""
    trained = [parameter for parameter in model.module.parameters() if model.access.knows(parameter)]
    if state == OffloadStateTypeEnum.hp_params:
        parts = [safe_get_local_fp32_param(parameter) for parameter in trained]
    elif state == OffloadStateTypeEnum.optim_states:
        parts = [
            safe_get_local_optimizer_state(parameter, key) for parameter in trained for key in ("exp_avg", "exp_avg_sq")
        ]
    elif state == OffloadStateTypeEnum.lp_params:
        parts = [part_of(parameter) for parameter in model.module.parameters()]
    else:
        parts = []
    home = torch.device("cpu") if model.offloaded.is_away(state.value) else model.device
    return {part.device for part in parts if part is not None} or {home}


# deepspeed.runtime.zero.utils


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer can run on shards."""
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
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the module of that dotted name by ``module``."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


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


# deepspeed.utils.numa


def parse_range(rng: str) -> range:
    """``"3"`` or ``"2-4"``, the end included. Raises: ConfigError: anything else."""
    first, _, last = rng.partition("-")
    if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first) or rng.endswith("-"):
        raise ConfigError(f"{rng!r} is not a core or a range of cores.", do="write 3 or 2-4.", code="cores")
    return range(int(first), int(last or first) + 1)


def parse_range_list(range_str: str) -> list[int]:
    """The numbers of a list of ranges, which ascend.

    Raises: ConfigError: it is no such list, or does not ascend.

    >>> parse_range_list("0,2-4,6")
    [0, 2, 3, 4, 6]
    """
    numbers: list[int] = []
    for part in range_str.split(","):
        cores = parse_range(part)
        if numbers and cores[0] <= numbers[-1]:
            raise ConfigError(
                f"{range_str!r}: {part} does not come after {numbers[-1]}.",
                do="let the ranges ascend, without overlap.",
                code="cores",
            )
        numbers += cores
    return numbers


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


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level. Raises: LogLevelError: no such level."""
    if log_level_str.lower() not in log_levels:
        raise LogLevelError(
            f"{log_level_str!r} is not one of the valid logging levels.", do=f"use one of: {', '.join(log_levels)}."
        )
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Raises: LogLevelError: no such level."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """The number of the logger's level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """True if the logger writes lines of this level. Raises: LogLevelError: no such level, or no text."""
    if not isinstance(max_log_level_str, str):
        raise LogLevelError(f"{max_log_level_str!r} is not a string.", do=f"use one of: {', '.join(log_levels)}.")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
