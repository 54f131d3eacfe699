"""``deepspeed.runtime.utils``: small helpers that scripts call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.access.engine_parameters import EngineParameters
from shoal.comm.world import current_world
from shoal.compat.accelerator import get_accelerator
from shoal.compat.partitioned_tensor import PartitionedTensor
from shoal.engine.log import say_on_rank_0
from shoal.errors import UsageError
from shoal.pipeline.balance import balance
from shoal.pipeline.balance import uniform as partition_uniform
from shoal.pipeline.module import set_random_seed
from shoal.running.parameter_owner import OWNERS
from shoal.text import format_bytes


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
    sums, total = [], 0
    for weight in weights:
        total += weight
        sums.append(total)
    return sums


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
    found = set(items)
    if len(found) != 1:
        raise UsageError(f"expected one value, got {len(found)}: {sorted(map(str, found))[:5]}.", code="not-unique")
    return found.pop()


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


__all__ = [
    "DummyOptim",
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "copy_to_device",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_grad_norm",
    "get_only_unique_item",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "move_to_device",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]
