"""``deepspeed.zero.Init``: Shoal's, with the dtype that the config says, for parameters and for what is made beside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from shoal.comm.world import current_world, init_distributed
from shoal.compat.environment import launched_ranks
from shoal.compat.tensor_constructors import ConstructorMode, zero_wrapper_for_fp_tensor_constructor
from shoal.config import Config, load
from shoal.engine.settings import wide_buffers_of
from shoal.errors import UsageError
from shoal.zero.buffer_formats import widen
from shoal.zero.init import Init as ShardingInit

_FACADE = "shoal.compat.deepspeed.runtime.zero.partition_parameters"


class Init(ShardingInit):
    """Shards parameters as modules are built. DeepSpeed's signature and meaning.

    Args:
        config_dict_or_path, config: its ``fp16`` and ``bf16`` say the dtype, its ``enable_sanity_checks`` is obeyed;
            ``"auto"`` may be left in it.
        dtype: in place of the config's.

    Buffers that the model or ``data_types.keep_in_fp32_modules`` names stay in fp32.
    Raises: UsageError: the launcher started several ranks, but the process group has one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        is_enabled = kwargs.get("enabled", True)
        if is_enabled and current_world().backend == "none":
            init_distributed(verbose=False)  # scripts ask torch.distributed for their rank, were there one alone
        config = kwargs.get("config_dict_or_path") or kwargs.get("config")
        settings = load(config, check_supported=False) if is_enabled and config is not None else None
        self._wide_buffers = None if settings is None else wide_buffers_of(settings)
        if is_enabled:
            _check_group()
        if settings is not None:
            self._is_watched = bool(settings.zero_optimization.enable_sanity_checks)
            kwargs["dtype"] = kwargs.get("dtype") or dtype_of(settings)
        self._constructors: ConstructorMode | None = None
        super().__init__(*args, **kwargs)

    def __enter__(self) -> Init:
        super().__enter__()
        if self._enabled and self._dtype is not None:
            self._constructors = ConstructorMode(_wrapper(), self._dtype, current_world().device)
            self._constructors.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._constructors is not None:
            self._constructors.__exit__(kind, error, trace)
            self._constructors = None
        super().__exit__(kind, error, trace)

    def _shard(self, module: nn.Module) -> None:
        super()._shard(module)
        widen(module, self._dtype, self._wide_buffers)

    def suspend(self) -> None:
        super().suspend()
        if self._constructors is not None:
            self._constructors.is_on = False

    def resume(self) -> None:
        super().resume()
        if self._constructors is not None:
            self._constructors.is_on = True


def dtype_of(settings: Config) -> torch.dtype:
    """The dtype that a config has a model built in."""
    if settings.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if settings.bf16.enabled else torch.float32


def _check_group() -> None:
    """Raises: UsageError: the launcher started several ranks, but the process group has one."""
    launched = launched_ranks()
    if current_world().size == 1 and launched > 1:
        raise UsageError(
            f"zero.Init: the process group has one rank, but WORLD_SIZE={launched}: every rank would hold the whole"
            " model.",
            do="call deepspeed.init_distributed() before anything makes a process group of its own; or unset WORLD_SIZE"
            " for a run of one rank.",
            code="zero-init-world",
        )


def _wrapper() -> Callable[..., Any]:
    """The function of the facade's module, which a client may have replaced."""
    facade = sys.modules.get(_FACADE)
    return vars(facade)["zero_wrapper_for_fp_tensor_constructor"] if facade else zero_wrapper_for_fp_tensor_constructor
