"""What DeepSpeed's clients read on parameters and modules, lent to torch's classes while the name is lent.

    parameter.ds_id, ds_shape, ds_numel      of one that zero.Init or a stage-3 engine holds; else AttributeError
    parameter.ds_status, ds_tensor           asked of Shoal's own records each time: nothing lies on a parameter
    parameter.all_gather(), all_gather_coalesced(), partition(), convert_to_zero_parameters()
    module.ds_external_parameters()

``lend`` puts them on ``torch.nn.Parameter`` and ``torch.nn.Module``, ``take_back`` removes them. Both do so for the
warnings of ``shoal.compat.clipping``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from shoal.comm.world import process_group
from shoal.compat import clipping
from shoal.engine.engine import Engine
from shoal.errors import UsageError
from shoal.zero.early import EARLY, EarlyShard, EarlyShards
from shoal.zero.gathered import GatheredParameters
from shoal.zero.registry import OWNERS
from shoal.zero.unit import Unit, UnitState


class ZeroParamStatus(Enum):
    """Is a parameter whole on this rank?"""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {UnitState.FULL: ZeroParamStatus.AVAILABLE, UnitState.GATHERING: ZeroParamStatus.INFLIGHT}


def is_zero_parameter(parameter: Any) -> bool:
    """Is it one that ``zero.Init`` or a stage-3 engine holds?"""
    return isinstance(parameter, torch.Tensor) and (_early(parameter) is not None or _engine(parameter) is not None)


def _early(parameter: torch.Tensor) -> EarlyShard | None:
    return EARLY.get(parameter)


def _engine(parameter: torch.Tensor) -> Engine | None:
    owner = OWNERS.get(parameter)
    return owner if isinstance(owner, Engine) and owner.zero_optimization_stage() == 3 else None


def _held(parameter: torch.Tensor, name: str) -> EarlyShard | tuple[Engine, Unit]:
    early = _early(parameter)
    if early is not None:
        return early
    engine = _engine(parameter)
    if engine is None:
        raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")
    return engine, engine.sharded.unit_of[id(parameter)]


def _id(parameter: torch.Tensor) -> int:
    held = _held(parameter, "ds_id")
    return held.number if isinstance(held, EarlyShard) else held[0].sharded.number_of[id(parameter)]


def _shape(parameter: torch.Tensor) -> torch.Size:
    _held(parameter, "ds_shape")
    return parameter.shape


def _numel(parameter: torch.Tensor) -> int:
    _held(parameter, "ds_numel")
    return parameter.numel()


def _status(parameter: torch.Tensor) -> ZeroParamStatus:
    held = _held(parameter, "ds_status")
    if isinstance(held, EarlyShard):
        is_whole = bool(held.holders) or held.is_touched
        return ZeroParamStatus.AVAILABLE if is_whole else ZeroParamStatus.NOT_AVAILABLE
    unit = held[1]
    if not unit.is_sharded:
        return ZeroParamStatus.AVAILABLE
    return _STATUS.get(unit.state, ZeroParamStatus.NOT_AVAILABLE)


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that ``zero.Init`` or a stage-3 engine holds, 1-D; not a copy."""
    held = _held(parameter, "ds_tensor")
    if isinstance(held, EarlyShard):
        return held.shard
    for bucket in held[1].buckets:
        for slot, member in zip(bucket.layout.slots, bucket.parameters, strict=True):
            if member is parameter:
                low, high = max(slot.offset, bucket.begin), min(slot.offset + slot.numel, bucket.end)
                own = bucket.shard if bucket.is_sharded else bucket.full[bucket.begin : bucket.end]
                return own[low - bucket.begin : max(low, high) - bucket.begin]
    raise AttributeError("ds_tensor")


def _persist(parameter: torch.Tensor) -> bool:
    held = _held(parameter, "ds_persist")
    return not isinstance(held, EarlyShard) and not held[1].is_sharded


def _group(parameter: torch.Tensor) -> Any:
    _held(parameter, "ds_process_group")
    return process_group()


def _modules(parameter: torch.Tensor) -> set[Any]:
    """The modules under way that use it: Shoal keeps no such record."""
    _held(parameter, "ds_active_sub_modules")
    return set()


_READ: dict[str, Callable[[Any], Any]] = {
    "ds_id": _id,
    "ds_shape": _shape,
    "ds_numel": _numel,
    "ds_status": _status,
    "ds_tensor": part_of,
    "ds_persist": _persist,
    "ds_process_group": _group,
    "ds_active_sub_modules": _modules,
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


class _Lent:
    """What lies on torch's classes now."""

    def __init__(self) -> None:
        self.blocks = _Blocks()
        self.names: list[tuple[type, str]] = []

    def put(self, cls: type, name: str, value: Any) -> None:
        setattr(cls, name, value)
        self.names.append((cls, name))


_lent = _Lent()


def _of(value: Callable[[Any], Any], name: str) -> Any:
    """A method that only a ZeRO parameter has: of another, the attribute is not there."""

    def read(parameter: torch.Tensor) -> Any:
        _held(parameter, name)
        return value(parameter)

    return property(read)


def _all_gather(parameter: torch.Tensor) -> Callable[..., None]:
    def all_gather(param_list: Iterable[Any] | None = None, async_op: bool = False, hierarchy: int = 0) -> None:
        """Make the parameter whole, or those of the list, until ``partition()``. Every rank calls."""
        for each in [parameter] if param_list is None else list(param_list):
            _lent.blocks.open(each)

    return all_gather


class _Gathered:
    """What ``all_gather_coalesced()`` gives: the parameters are whole already."""

    def wait(self, handle_dependency: bool = True) -> None: ...


def _all_gather_coalesced(parameter: torch.Tensor) -> Callable[..., _Gathered]:
    def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> _Gathered:
        """Make the parameters of the list whole until ``partition()``. Every rank calls."""
        for each in params:
            _lent.blocks.open(each)
        return _Gathered()

    return all_gather_coalesced


def _partition(parameter: torch.Tensor) -> Callable[..., None]:
    def partition(param_list: Iterable[Any] | None = None, hierarchy: int = 0, has_been_updated: bool = False) -> None:
        """End what ``all_gather()`` began. ``has_been_updated``: rank 0's changes are given to all."""
        for each in [parameter] if param_list is None else list(param_list):
            _lent.blocks.close(each, is_changed=has_been_updated)

    return partition


def _convert(parameter: torch.Tensor) -> Callable[[Iterable[nn.Parameter]], None]:
    held = _held(parameter, "convert_to_zero_parameters")

    def convert_to_zero_parameters(param_list: Iterable[nn.Parameter]) -> None:
        """Shard parameters that were made after ``zero.Init``, each in its own format. Every rank calls.

        Communicates: one broadcast of each (rank 0's values count).
        Raises: UsageError: an engine holds this one, and so the model, already.
        """
        if not isinstance(held, EarlyShard):
            raise UsageError(
                "convert_to_zero_parameters(): the model's engine is made already.",
                do="add the parameters to the model before initialize().",
                code="zero-init-late",
            )
        shards = EarlyShards(held.comm, held.device, home=held.home)
        for each in param_list:
            shards.shard(each)

    return convert_to_zero_parameters


def _partition_numel(parameter: torch.Tensor) -> Callable[[], int]:
    held = _held(parameter, "partition_numel")
    size = held._comm.size if isinstance(held, EarlyShard) else held[0].axes.inner.size
    return lambda: -(-parameter.numel() // size)


def _item(parameter: torch.Tensor) -> Any:
    """The value of a parameter of one element, gathered where it is sharded."""
    if not is_zero_parameter(parameter):
        return torch.Tensor.item(parameter)
    with GatheredParameters([parameter]):
        return torch.Tensor.item(parameter)


def _external_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of other modules that this one's forward reads: Shoal keeps them by unit, and gathers them."""
    return iter(())


_METHODS: dict[str, Callable[[Any], Any]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
    "partition_numel": _partition_numel,
    "convert_to_zero_parameters": _convert,
}


def lend() -> None:
    """Put the names on torch's classes. Idempotent."""
    clipping.lend()
    if _lent.names:
        return
    for name, read in _READ.items():
        _lent.put(nn.Parameter, name, property(read))
    for name, method in _METHODS.items():
        _lent.put(nn.Parameter, name, _of(method, name))
    _lent.put(nn.Parameter, "item", _item)
    _lent.put(nn.Module, "ds_external_parameters", _external_parameters)


def take_back() -> None:
    """Remove them."""
    clipping.take_back()
    for cls, name in _lent.names:
        delattr(cls, name)
    _lent.names.clear()
