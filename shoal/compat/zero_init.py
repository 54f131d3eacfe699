"""``deepspeed.zero.Init``: Shoal's, with the config's dtype also for other tensors that are made in the context."""

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
from shoal.engine.settings import wide_buffers_of
from shoal.errors import UsageError
from shoal.zero.buffer_formats import widen
from shoal.zero.init import Init as ShardingInit

_FACADE = "shoal.compat.deepspeed.runtime.zero.partition_parameters"


class Init(ShardingInit):
    """Shards parameters as modules are built. DeepSpeed's signature and meaning.

    Args:
        config_dict_or_path, config: its ``fp16`` and ``bf16`` give the dtype of parameters and of tensors made in the
            context, fp32 without them; its ``enable_sanity_checks`` is obeyed; it may contain ``"auto"``.
        dtype: in place of the config's.

    Buffers that the model or ``data_types.keep_in_fp32_modules`` names stay in fp32.
    Raises: UsageError: the launcher started several ranks, but the process group has one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enabled", True):
            if current_world().backend == "none":
                # Scripts ask torch.distributed for their rank, even for a single one.
                init_distributed(verbose=False)
            _check_group()
        self._constructors: ConstructorMode | None = None
        super().__init__(*args, **kwargs)

    def _dtype_of_config(self) -> torch.dtype | None:
        return super()._dtype_of_config() or (None if self._settings is None else torch.float32)

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
        widen(module, self._dtype, None if self._settings is None else wide_buffers_of(self._settings))

    def suspend(self) -> None:
        super().suspend()
        if self._constructors is not None:
            self._constructors.is_on = False

    def resume(self) -> None:
        super().resume()
        if self._constructors is not None:
            self._constructors.is_on = True


def _check_group() -> None:
    """Raises: UsageError: the launcher started several ranks, but the process group has one."""
    launched = launched_ranks()
    if current_world().size == 1 and launched > 1:
        raise UsageError(
            f"zero.Init: the process group has one rank, but WORLD_SIZE={launched}: every rank would store the whole"
            " model.",
            do="call deepspeed.init_distributed() before anything makes a process group of its own; or unset WORLD_SIZE"
            " for a run of one rank.",
            code="zero-init-world",
        )


def _wrapper() -> Callable[..., Any]:
    """The wrapper in DeepSpeed's module, which a client may have replaced."""
    facade = sys.modules.get(_FACADE)
    return vars(facade)["zero_wrapper_for_fp_tensor_constructor"] if facade else zero_wrapper_for_fp_tensor_constructor
