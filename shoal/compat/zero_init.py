"""``deepspeed.zero.Init``: Shoal's, with the config's dtype also for other tensors; and gathering for generation.

A wrapper, which clients may replace, makes tensors in the config's dtype inside the context:

    torch.zeros(3)                      -> wrapped[torch.zeros](3)
    wrapped[fn] = zero_wrapper_for_fp_tensor_constructor(fn, dtype, target_device=device)

Transformers replaces the wrapper, by its module's name, before it opens the context, so that ``torch.arange`` is left
alone. Torch is not patched here: a mode sees the calls of the thread that builds the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.access.init import Init as ShardingInit
from shoal.build.materialize import widen
from shoal.comm.world import current_world, init_distributed
from shoal.compat.environment import launched_ranks
from shoal.engine.engine import Engine
from shoal.engine.settings import wide_buffers_of
from shoal.errors import UsageError
from shoal.zero import GatheredParameters

_FACADE = "shoal.compat.deepspeed.runtime.zero.partition_parameters"
Constructor = Callable[..., torch.Tensor]

CONSTRUCTORS: tuple[Constructor, ...] = (
    torch.tensor,
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.eye,
    torch.randn,
)


class ZeroParamType(Enum):
    """Whether a parameter is gathered, sharded, or sharded on other ranks."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DeepSpeedTensorOverride(Enum):
    """The kinds of tensors whose dtype ``zero.Init`` may change."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]


def zero_wrapper_for_fp_tensor_constructor(
    fn: Constructor, target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Constructor:
    """``fn``, whose floating-point tensors come out in a dtype, and on a device where the caller names none."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is not None and made.is_floating_point():
            made.data = made.data.to(target_fp_dtype)
        return made

    return wrapped


class ConstructorMode(TorchFunctionMode):
    """While active, calls of the constructors go through ``wrapper``, as ``zero_wrapper_for_fp_tensor_constructor``."""

    def __init__(self, wrapper: Callable[..., Constructor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._wrapped = {fn: wrapper(fn, dtype, target_device=device) for fn in CONSTRUCTORS}
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wrapped = self._wrapped.get(func) if self.is_on else None
        return (wrapped if wrapped is not None else func)(*args, **(kwargs or {}))


class Init(ShardingInit):
    """Shards parameters as modules are built. DeepSpeed's signature and meaning.

    Args:
        config_dict_or_path, config: its ``fp16`` and ``bf16`` give the dtype of parameters and of tensors made in the
            context, fp32 without them; its ``enable_sanity_checks`` applies; it may contain ``"auto"``.
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


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The engine's model, with every parameter gathered and all hooks inactive until the block ends.

    Communicates: an all_gather per unit, once.
    Memory: all parameters, on every rank.
    """
    if not isinstance(model, Engine):
        with GatheredParameters(model.parameters()):
            yield model
        return
    with GatheredParameters(model.module.parameters()):
        model.sharded.switch.is_on = False
        model.sharded.order.forget()
        try:
            yield model.module
        finally:
            model.sharded.switch.is_on = True
