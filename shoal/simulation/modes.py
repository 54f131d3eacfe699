"""Tells a simulated accelerator of every operator of torch that this thread runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.simulation.effects import accessed, effects_of

_READERS = (torch.Tensor.tolist, torch.Tensor.numpy)


class Watcher(Protocol):
    """What the modes tell."""

    @property
    def is_paused(self) -> bool: ...

    def notice_deaths(self) -> None: ...

    def operator(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None: ...

    def unknown(self, name: str, why: str) -> None: ...

    def read_on_host(self, tensor: torch.Tensor) -> None: ...


class _Operators(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # an attribute of a subclass
            return func(*args, **kwargs)
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
        result = func(*args, **kwargs)
        if any(not torch.equal(tensor.nan_to_num(), values.nan_to_num()) for tensor, values in before):
            watcher.unknown(str(func), "it changes an argument that its schema does not say it writes")
        watcher.operator(func, args, kwargs, result)
        return result


class _Readers(TorchFunctionMode):
    """Reads of values that no operator shows, because a CPU's tensors are read where they lie."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not self._watcher.is_paused:
            self._watcher.read_on_host(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside the block, ``watcher`` is told what this thread does."""
    with _Readers(watcher), _Operators(watcher):
        yield
