"""What replaces a tensor or a module that is on another pipeline stage.

A stage runs the whole model's forward, and the result of a module before the blocks is needed there only for its shape,
dtype and device. So a *guard* replaces it: a tensor of NaN. A guard must not reach what this stage computes. The
backward pass raises where a gradient arrives at one, and arguments of blocks are checked.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.comm.protocol import shapes_only
from shoal.compiler import untraced
from shoal.device import fake_tensors
from shoal.errors import ModelError
from shoal.pipeline.blocks import cut_error
from shoal.pipeline.left_behind import OF_MODULES, kept, roots

_SHOAL = Path(__file__).parent.parent
_NOT_THE_MODELS = (str(Path(torch.__file__).parent), str(_SHOAL / "pipeline"), str(_SHOAL / "compiler.py"))
_MAX_NODES = 200  # of the autograd graph that are visited for one argument; a guard is near where it is misused


class _Guarded(torch.autograd.Function):
    """A tensor without values, whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor, of: str) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.of = of
        return torch.full(like.shape, float("nan"), dtype=like.dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        if grads[0] is not None and bool(grads[0].any()):  # reentrant recomputation passes zeros for None
            raise guard_error(ctx.of, "a gradient arrives at it: the loss of this stage depends on it")
        return None, None, None


def guard(like: torch.Tensor, device: torch.device, of: str) -> torch.Tensor:
    """A tensor of ``like``'s shape and dtype: NaN, or zeros where the dtype has no NaN.

    Args:
        of: what it replaces, for errors.
    """
    if not like.is_floating_point() and not like.is_complex():
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    # The guard has a gradient by it, where there are any.
    anchor = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
    guarded: torch.Tensor = _Guarded.apply(anchor, like, of)
    return guarded


@untraced
def line_of_model() -> str:
    """The line of the model's code that runs, in parentheses; empty: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
        frame = frame.f_back
    return "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"


def guarded_by(tensor: torch.Tensor) -> str | None:
    """What a guard replaces that ``tensor`` was computed from, if one is near in the graph."""
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "_GuardedBackward":
            of: str = node.of
            return of
        # An autograd function of the user's (reentrant recomputation) may be given a guard and not use it.
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            nodes += [parent for parent, _ in node.next_functions]
    return None


def guard_error(of: str, what: str) -> ModelError:
    return cut_error(
        f"the model cannot be cut between its blocks: it uses {of}, which this pipeline stage does not have; {what}.",
        "add a module that is used before the blocks to pipeline.first_stage, and one whose result each stage needs "
        "to pipeline.every_stage; let what a block needs of the blocks before be an argument that is passed on "
        "unchanged; or write a PipelineModule.",
    )


class AbsentModule(nn.Module):
    """Keeps the place of a module that is on other pipeline stages only. It has no parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            "this module is on other pipeline stages only, so it can be called within a pipeline stage's forward only.",
            where="pipeline",
            do="call engine.train_batch() or engine.eval_batch().",
            code="pipeline-absent",
        )


class Delegate:
    """Has the attributes and the class of a module, and another ``__call__``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property  # type: ignore[misc]  # isinstance() of the module's class is true
    def __class__(self) -> Any:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._module, name, value)


class StandIn(Delegate):
    """Called in place of a module that is on other stages: returns guards of the shapes that the module returns.

    Args:
        module: with parameters on the meta device.
        check: called first; raises where the module must not be called.
        keep: makes a guard like a tensor, and says of what it is.
        receive: called last, with the module and the call's arguments; returns its first output, if that is known here.
    """

    def __init__(
        self,
        module: nn.Module,
        of: str,
        check: Callable[[], None],
        receive: Callable[..., torch.Tensor | None],
        keep: Callable[[torch.Tensor, str], torch.Tensor],
    ) -> None:
        super().__init__(module)
        self._of = of
        self._check = check
        self._receive = receive
        self._keep = keep

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return self._keep(value, f"{self._of}{line_of_model()}") if isinstance(value, nn.Parameter) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        root = {"": roots(self._module, args, kwargs)}
        before = kept(root)
        try:
            with shapes_only():
                output = _shapes_of(self._module, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise cut_error(
                f"the shape of what {self._of} returns cannot be known without running it: {error}",
                "write a PipelineModule.",
            ) from error
        of = f"{self._of}{line_of_model()}"
        for path, place in kept(root).items():  # what hooks collected has no values
            if path not in before:
                place.take_out()
        known = self._receive(self._module, args, kwargs)
        first = [] if known is None else [known]
        return tree_map_only(torch.Tensor, lambda tensor: first.pop() if first else self._keep(tensor, of), output)


@torch.no_grad()
def _shapes_of(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a module with parameters on the meta device returns, without values."""
    if not (module._modules or torch._C._is_any_autocast_enabled()):  # on meta, autocast casts nothing
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        return module(*args, **kwargs)
    # One of many parts may look at devices and, unless its tensors are fakes, at values.
    devices = [t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    with fake_tensors():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            device = tensor.device if tensor.device.type != "meta" else devices[0] if devices else torch.device("cpu")
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

        owned = {name: fake(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        args, kwargs = tree_map_only(torch.Tensor, fake, (args, kwargs))
        return torch.func.functional_call(module, owned, args, kwargs)


def to_meta(module: nn.Module, kept: set[int]) -> None:
    """Move a module's parameters and buffers to the meta device, in place; modules with an ``id`` in ``kept`` stay."""
    for part in module.modules():
        if id(part) not in kept:
            tensors: Any = (part._parameters, part._buffers)
            for owned in tensors:
                owned.update({name: _meta(tensor) for name, tensor in owned.items() if tensor is not None})


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module, with parameters and buffers on the meta device. Hooks and attributes are the module's own."""
    memo: dict[int, Any] = {id(t): _meta(t) for t in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        memo |= {id(v): v for key, v in vars(part).items() if key not in OF_MODULES or key.startswith("_forward_hooks")}
    return copy.deepcopy(module, memo)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
