"""torch's compiler: what it must not trace, what it may not compile, and no import of it before something is compiled.

``torch._dynamo`` takes a second of each rank's start and 70 MB of its memory. torch imports it when an optimizer is
made and when one steps, for the sake of compiled callers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef

from shoal.shared_block import SharedBlock

P = ParamSpec("P")
R = TypeVar("R")


def is_imported() -> bool:
    """True if this process has compiled something, or imported the compiler."""
    return "torch._dynamo" in sys.modules


def num_compiled_graphs() -> int:
    """Graphs that the compiler has found in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if is_imported() else 0


def untraced(function: Callable[P, R], *, recursive: bool = True) -> Callable[P, R]:
    """``function``, which runs as it is in compiled callers too: ``torch.compiler.disable``, once it is imported.

    Args:
        recursive: what it calls is not compiled either.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_imported():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function, recursive=recursive))
            torch._dynamo.decorators.skip(call)  # else these lines are compiled, for each signature and up to a limit
        return disabled[0](*args, **kwargs)

    # What torch.compiler.disable sets, so that a traced caller calls this and does not look inside.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


_UNCOMPILED = SharedBlock(lambda: torch.compiler.set_stance("force_eager"))


def uncompiled() -> AbstractContextManager[None]:
    """Inside the block, and in other threads meanwhile, what is or will be compiled runs as it was written."""
    return _UNCOMPILED


def eager_operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """An operator of compiled graphs that runs as it is written, as it communicates or keeps graphs of autograd.

    In a CUDA graph a replay would leave its Python out: PyTorch divides the CUDA graph there.
    """
    return torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


class GraphSteps:
    """Where a step of CUDA graphs begins, as PyTorch has to be told: what they returned before may be overwritten then.

    PyTorch has one such place for the process. Without a mark a graph's memory is in use as long as its tensors live.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakSet[object] = WeakSet()

    def begin(self, owner: object, *, is_training: bool) -> None:
        """Before a forward pass of ``owner``: mark a step, unless another pass, also of another owner, may need memory.

        Args:
            is_training: a backward pass may follow. Nothing is marked until ``end``.
        """
        with self._lock:
            if not self._open:
                torch.compiler.cudagraph_mark_step_begin()
            if is_training:
                self._open.add(owner)

    def end(self, owner: object) -> None:
        """The optimizer has stepped: ``owner`` needs no gradient and no activation any more. Idempotent."""
        with self._lock:
            self._open.discard(owner)


GRAPH_STEPS = GraphSteps()


def make_optimizer(kind: type[torch.optim.Optimizer], *args: Any, **settings: Any) -> torch.optim.Optimizer:
    """``kind(*args, **settings)``, whose steps do not import the compiler either. Raises: what ``kind`` raises."""
    if is_imported() or not _is_torchs(kind, "add_param_group"):
        return kind(*args, **settings)
    made = kind.__new__(kind)
    # The constructor adds its groups through this, which it finds on the object before the class.
    vars(made)["add_param_group"] = MethodType(inspect.unwrap(kind.add_param_group), made)
    kind.__init__(made, *args, **settings)
    del vars(made)["add_param_group"]
    if _is_torchs(kind, "step") and not made.defaults.get("differentiable"):
        vars(made)["step"] = MethodType(_without_break(kind.step), made)
    return made


def _without_break(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step without the break that it makes in a graph being recorded, as long as none can be."""
    unbroken = torch.optim.Optimizer.profile_hook_step(inspect.unwrap(step))  # with its hooks and its name in profiles

    def run(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if is_imported():
            return step(optimizer, closure)
        with torch.no_grad():
            return unbroken(optimizer, closure)

    return run


def _is_torchs(kind: type[torch.optim.Optimizer], name: str) -> bool:
    """True if the method is written in torch.optim, so that what is wrapped around it is known."""
    return str(getattr(kind, name).__module__).startswith("torch.optim.")


def with_cuda_graphs(model: nn.Module, device: torch.device) -> list[str]:
    """Names of the modules that are compiled with CUDA graphs; none where there is no GPU."""
    if not is_imported() or not _has_graphs(device):
        return []
    return [name for name, module in model.named_modules() if _has_cuda_graphs(module)]


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def is_compiled(module: nn.Module) -> bool:
    """True if the module was wrapped by ``torch.compile``, or compiled in place."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def _has_cuda_graphs(module: nn.Module) -> bool:
    """True if the module was wrapped by ``torch.compile``, or compiled in place, with CUDA graphs."""
    for compiled in (module, vars(module).get("_compiled_call_impl"), vars(module).get("forward")):
        settings = getattr(compiled, "get_compiler_config", None)
        config = settings() if settings is not None else None
        if config is not None and config.get("triton.cudagraphs"):
            return True
    return False
