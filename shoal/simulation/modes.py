"""Tells a simulated accelerator of every operator of torch that this thread runs, and what each reads and writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.compiler import uncompiled
from shoal.errors import UsageError
from shoal.function_mode import UnorderedFunctionMode
from shoal.shared_block import SharedBlock
from shoal.simulation.accesses import place_of_call

_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias")  # whose schemas do not say so
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_CHECKS = frozenset({"aten::_linalg_check_errors"})  # the host reads the values, and may raise
_DEVICE_CHECK = "aten::_assert_async"  # which raises later
_OVERWRITES = ("copy_", "zero_", "fill_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_")
_SYNCHRONIZING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Effects:
    """Of one operator.

    Attributes: ``arguments``: place, name and whether it is written, of each argument that is accessed and not only
    viewed. ``unknown``: why the schema does not tell; empty: it does. ``blocks_host``: the host needs the result.
    ``overwrites``: it does not read what it writes.
    """

    arguments: tuple[tuple[int, str, bool], ...] = ()
    unknown: str = ""
    blocks_host: bool = False
    is_custom: bool = False
    overwrites: bool = False


@cache
def effects_of(operator: Any) -> Effects:
    """Read the schema of an operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Effects(unknown="it is no operator with a schema")
    schema = operator._schema
    if torch.Tag.inplace_view in operator.tags or schema.name in _VIEWS:
        return Effects()
    arguments = []
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
            arguments.append((place, argument.name, alias is not None))
    unknown = ""
    if schema.name in _CHECKS:
        return Effects(tuple(arguments), blocks_host=True)
    has_effect = schema.returns or schema.name == _DEVICE_CHECK or any(written for _, _, written in arguments)
    if arguments and not has_effect:
        unknown = "its schema has no result and no argument that it writes"
    is_custom = operator.namespace not in ("aten", "prims", "prim", "c10d", "_c10d_functional")
    blocks_host = any(tag in operator.tags for tag in _SYNCHRONIZING)
    overwrites = operator.overloadpacket.__name__ in _OVERWRITES or any(each.is_out for each in schema.arguments)
    return Effects(tuple(arguments), unknown, blocks_host, is_custom, overwrites)


def accessed(
    effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, name, is_written in effects.arguments:
        value = args[place] if place < len(args) else kwargs.get(name)
        (writes if is_written else reads).extend(tensors_of(value))
    return reads, writes


def needs_values(operator: Any, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the host must know values of the call's tensors, such as for the shape of a result.

    The tags of an operator do not tell where this depends on its arguments.
    """
    name = getattr(operator, "overloadpacket", operator).__name__
    if name in INDEXED:  # a mask as an index becomes the places where it is true
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return kwargs.get("output_size") is None if name == "repeat_interleave" else effects.blocks_host


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value of a call: itself, or those of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def parts_of_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that a tensor consists of. Raises: TypeError: of a layout that is not known."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    else:
        raise TypeError(str(tensor.layout))


_WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_READERS = (torch.Tensor.tolist, torch.Tensor.numpy)


class Watcher(Protocol):
    """What the modes tell."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_timed_gpu(self) -> bool: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def notice_deaths(self) -> None: ...

    def operator(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None: ...

    def unknown(self, name: str, why: str) -> None: ...

    def read_on_host(self, tensor: torch.Tensor) -> None: ...


class _Operators(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled; the wrapper would take a tenth of a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # an attribute of a subclass
            return func(*args, **kwargs)
        if func.namespace == "shoal" and FakeTensor not in types:  # it runs other operators, which are seen
            calls = _WATCHED.calls
            with self, nullcontext() if calls is None or calls in _get_current_function_mode_stack() else calls:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # the subclass runs operators of plain tensors, which come here
        watcher = self._watcher
        if watcher.is_paused:
            return func(*args, **kwargs)
        watcher.notice_deaths()
        effects = effects_of(func)
        before = []
        if effects.is_custom and FakeTensor not in types:  # its schema was written by hand and may be wrong
            reads = accessed(effects, args, kwargs)[0]
            before = [(tensor, tensor.clone()) for tensor in reads if tensor.layout is torch.strided]
        try:
            result = func(*args, **kwargs)
        except _WITHOUT_VALUES as error:
            raise UsageError(
                f"{func} cannot run in a dry run, whose tensors have shapes and no values: {type(error).__name__}.",
                where=place_of_call(),
                do="write this line without the values of tensors (item(), if tensor:, nonzero(), masks as indices); a"
                " custom operator needs register_fake.",
                code="dry-run-values",
            ) from error
        if any(not torch.equal(tensor.nan_to_num(), values.nan_to_num()) for tensor, values in before):
            watcher.unknown(str(func), "it changes an argument that its schema does not say it writes")
        watcher.operator(func, args, kwargs, result)
        return result


class _RmsNorm(torch.autograd.Function):
    """``rms_norm`` as the one kernel of a GPU, and one in backward: operators of a CPU's tensors are many."""

    @staticmethod
    def forward(ctx: Any, watcher: Watcher, source: torch.Tensor, shape: Any, weight: Any, eps: Any) -> Any:
        with watcher.paused():
            normed, inverse_root = torch.ops.aten._fused_rms_norm(source, shape, weight, eps)
        watcher.operator(
            torch.ops.aten._fused_rms_norm.default, (source, shape, weight, eps), {}, (normed, inverse_root)
        )
        ctx.save_for_backward(source, inverse_root, weight)
        ctx.shape = shape
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, inverse_root, weight = ctx.saved_tensors
        is_needed = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        of_source, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, source, ctx.shape, inverse_root, weight, is_needed
        )
        return None, of_source, None, of_weight, None


class _FunctionCalls(UnorderedFunctionMode):
    """Reads of values that no operator shows, because a CPU's tensors are read where they lie, and the norm."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not self._watcher.is_paused:
            self._watcher.read_on_host(args[0])
        if func is torch.nn.functional.rms_norm and self._watcher.is_timed_gpu and not self._watcher.is_paused:
            return self._rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rms_norm(self, source: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        """On a GPU one kernel computes it, where the weight has the input's dtype."""
        is_plain = all(isinstance(each, FakeTensor) for each in (source, weight) if each is not None)
        if is_plain and not torch.is_autocast_enabled() and (weight is None or weight.dtype == source.dtype):
            return _RmsNorm.apply(self._watcher, source, list(shape), weight, eps)
        return torch.nn.functional.rms_norm(source, shape, weight, eps)


class WithoutInitialValues(TorchFunctionMode):
    """Inside the block ``torch.nn.init`` does nothing: for models that are built for their shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class _WatchedThread(threading.local):
    calls: _FunctionCalls | None = None


_WATCHED = _WatchedThread()


@contextmanager
def _seeing_backward() -> Iterator[None]:
    """Functions that backward recomputes are seen as others are: torch takes modes off before it runs a pass."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_seen(*args: Any, **kwargs: Any) -> Any:
        calls = _WATCHED.calls
        if calls is None or calls in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        with calls:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_seen  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


_SEEING_BACKWARD = SharedBlock(_seeing_backward)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside the block, ``watcher`` is told what this thread does, uncompiled: the compiler would trace the watcher."""
    with uncompiled(), _SEEING_BACKWARD, _FunctionCalls(watcher) as calls, _Operators(watcher):
        before, _WATCHED.calls = _WATCHED.calls, calls
        try:
            yield
        finally:
            _WATCHED.calls = before
