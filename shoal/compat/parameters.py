"""What DeepSpeed's clients read of sharded parameters: attributes, which ``install()`` adds to torch's classes, and
``deepspeed.utils.tensor_fragment``.

    parameter.ds_id, ds_shape, ds_numel      of a parameter of zero.Init or a stage-3 engine; else AttributeError
    parameter.ds_status, ds_tensor           read from Shoal's own records each time: parameters carry no state
    parameter.all_gather(), all_gather_coalesced(), partition(), convert_to_zero_parameters()
    module.ds_external_parameters()

``add_attributes`` sets them on ``torch.nn.Parameter`` and ``torch.nn.Module``, ``remove_attributes`` deletes them. In
between torch's ``clip_grad_norm_`` on parameters of an engine warns, where it is an error otherwise.

The ``safe_get_`` functions are Shoal's own with DeepSpeed's results for missing values: None for a frozen parameter,
where Shoal's raise; a tensor of no elements for a part that this rank does not own, where Shoal's return None.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from shoal import zero
from shoal.access.engine_parameters import EngineParameters
from shoal.access.gathered import GatheredParameters
from shoal.comm.world import process_group
from shoal.engine.parts.clipping import CLIPPING
from shoal.errors import UsageError
from shoal.running.parameter_owner import OWNERS, ParameterOwner, ParameterState
from shoal.running.sharded_at_init import ShardedAtInit


class ZeroParamStatus(Enum):
    """Whether a parameter is whole on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS: dict[ParameterState, ZeroParamStatus] = {
    "gathered": ZeroParamStatus.AVAILABLE,
    "gathering": ZeroParamStatus.INFLIGHT,
    "sharded": ZeroParamStatus.NOT_AVAILABLE,
}


def is_zero_parameter(parameter: Any) -> bool:
    """True if it is a parameter of ``zero.Init`` or of a stage-3 engine."""
    return isinstance(parameter, torch.Tensor) and _zero_owner(parameter) is not None


def _zero_owner(parameter: torch.Tensor) -> ParameterOwner | None:
    owner = OWNERS.get(parameter)
    return owner if owner is not None and owner.stage == 3 else None


def _owner(parameter: torch.Tensor, name: str) -> ParameterOwner:
    owner = _zero_owner(parameter)
    if owner is None:
        raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")
    return owner


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter of ``zero.Init`` or a stage-3 engine, 1-D; not a copy."""
    return _owner(parameter, "ds_tensor").shard_of(parameter)


# What an attribute is, given a parameter and its owner.
_READ: dict[str, Callable[[Any, ParameterOwner], Any]] = {
    "ds_id": lambda parameter, owner: owner.number_of(parameter),
    "ds_shape": lambda parameter, owner: parameter.shape,
    "ds_numel": lambda parameter, owner: parameter.numel(),
    "ds_status": lambda parameter, owner: _STATUS[owner.state_of(parameter)],
    "ds_tensor": lambda parameter, owner: owner.shard_of(parameter),
    "ds_persist": lambda parameter, owner: not owner.is_sharded(parameter),
    "ds_process_group": lambda parameter, owner: process_group(),
    "ds_active_sub_modules": lambda parameter, owner: set(),  # Shoal keeps no record of the modules that run
}


class _Blocks:
    """Blocks that ``all_gather()`` has opened and ``partition()`` will close, by parameter."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[weakref.ref[torch.Tensor], GatheredParameters]] = {}

    def open(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._open:
            block = GatheredParameters([parameter])
            block.__enter__()
            self._open[id(parameter)] = weakref.ref(parameter), block

    def close(self, parameter: torch.Tensor, *, is_changed: bool) -> None:
        entry = self._open.pop(id(parameter), None)
        if entry is None:
            return
        if is_changed:
            with GatheredParameters([parameter], modifier_rank=0):
                pass
        entry[1].__exit__(None, None, None)


class _AddedAttributes:
    """The attributes that are on torch's classes now."""

    def __init__(self) -> None:
        self.blocks = _Blocks()
        self.names: list[tuple[type, str]] = []

    def put(self, cls: type, name: str, value: Any) -> None:
        setattr(cls, name, value)
        self.names.append((cls, name))


_added = _AddedAttributes()


def _property(read: Callable[[Any, ParameterOwner], Any], name: str) -> property:
    """An attribute that only a ZeRO parameter has."""
    return property(lambda parameter: read(parameter, _owner(parameter, name)))


def _bound(method: Callable[..., Any]) -> Callable[[Any, ParameterOwner], Any]:
    return lambda parameter, _: partial(method, parameter)


def _all_gather(
    parameter: Any, param_list: Iterable[Any] | None = None, async_op: bool = False, hierarchy: int = 0
) -> None:
    """Make the parameter whole, or those of the list, until ``partition()``. Every rank calls."""
    for each in [parameter] if param_list is None else list(param_list):
        _added.blocks.open(each)


class _Gathered:
    """What ``all_gather_coalesced()`` gives: the parameters are whole already."""

    def wait(self, handle_dependency: bool = True) -> None: ...


def _all_gather_coalesced(
    parameter: Any, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False
) -> _Gathered:
    """Make the parameters of the list whole until ``partition()``. Every rank calls."""
    for each in params:
        _added.blocks.open(each)
    return _Gathered()


def _partition(
    parameter: Any, param_list: Iterable[Any] | None = None, hierarchy: int = 0, has_been_updated: bool = False
) -> None:
    """End what ``all_gather()`` began. ``has_been_updated``: broadcast rank 0's changes."""
    for each in [parameter] if param_list is None else list(param_list):
        _added.blocks.close(each, is_changed=has_been_updated)


def _convert(parameter: Any, param_list: Iterable[nn.Parameter]) -> None:
    """Shard parameters that were made after ``zero.Init``, each in its own format. Every rank calls.

    Communicates: one broadcast of each (rank 0's values count).
    Raises: UsageError: the parameter belongs to an engine already.
    """
    owner = _owner(parameter, "convert_to_zero_parameters")
    if not isinstance(owner, ShardedAtInit):
        raise UsageError(
            "convert_to_zero_parameters(): the model already has an engine.",
            do="add the parameters to the model before initialize().",
            code="zero-init-late",
        )
    at_init = ShardedAtInit(owner.transfer, shard_device=owner.shard_device)
    for each in param_list:
        at_init.shard(each)


def _partition_numel(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() // _owner(parameter, "partition_numel").num_shards(parameter))


def _item(parameter: torch.Tensor) -> Any:
    """The value of a parameter of one element, gathered where it is sharded."""
    if not is_zero_parameter(parameter):
        return torch.Tensor.item(parameter)
    with GatheredParameters([parameter]):
        return torch.Tensor.item(parameter)


def _external_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of other modules that this one's forward reads; empty: Shoal's units gather shared parameters."""
    return iter(())


_METHODS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
    "partition_numel": _partition_numel,
    "convert_to_zero_parameters": _convert,
}


def add_attributes() -> None:
    """Add the attributes to torch's classes. Idempotent."""
    CLIPPING.is_error = False
    if _added.names:
        return
    for name, read in _READ.items():
        _added.put(nn.Parameter, name, _property(read, name))
    for name, method in _METHODS.items():
        _added.put(nn.Parameter, name, _property(_bound(method), name))
    _added.put(nn.Parameter, "item", _item)
    _added.put(nn.Module, "ds_external_parameters", _external_parameters)


def remove_attributes() -> None:
    """Remove the attributes."""
    CLIPPING.is_error = True
    for cls, name in _added.names:
        delattr(cls, name)
    _added.names.clear()


# deepspeed.utils.tensor_fragment


def _none_if_frozen(read: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """``read``, which returns None for a frozen parameter of an engine."""

    @wraps(read)
    def get(param: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        owner = OWNERS.get(param)
        is_frozen = isinstance(owner, EngineParameters) and not owner.knows(param)
        return None if is_frozen else read(param, *args, **kwargs)

    return get


safe_get_full_fp32_param = _none_if_frozen(zero.safe_get_full_fp32_param)
safe_get_full_grad = _none_if_frozen(zero.safe_get_full_grad)
safe_get_full_optimizer_state = _none_if_frozen(zero.safe_get_full_optimizer_state)


@_none_if_frozen
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the main parameter, 1-D; None of a frozen parameter."""
    return _or_nothing(zero.safe_get_local_fp32_param(param))


@_none_if_frozen
def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient, 1-D, fp32; None before backward, and of a frozen parameter."""
    owner = OWNERS.get(param)
    has_gradient = isinstance(owner, EngineParameters) and owner.has_gradient(param)
    return _or_nothing(zero.safe_get_local_grad(param)) if has_gradient else None


@_none_if_frozen
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one optimizer state, 1-D; None of a frozen parameter, and before the first step."""
    part = zero.safe_get_local_optimizer_state(param, optim_state_key)
    is_elsewhere = part is None and zero.safe_get_local_fp32_param(param) is None
    return torch.empty(0, dtype=torch.float32, device="cpu") if is_elsewhere else part


def _or_nothing(part: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu") if part is None else part


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's gradient by ``update_func(gradient, parameter)``. Every rank calls.

    Communicates: an all_gather of each gradient.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            zero.safe_set_full_grad(parameter, update_func(gradient, parameter))
