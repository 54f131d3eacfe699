"""``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` on parameters of an engine are an error.

An engine moves the gradient of a parameter to its buffer as soon as it is complete, so on several ranks torch's
functions find none: they would change nothing (and return a norm of 0), as under DeepSpeed; or they find those of this
rank alone (in ``no_sync``), or of its part of the model. Where all of the gradients are on the parameters (one rank)
they clip them.

While an engine lives, the functions of torch that change the gradients are replaced by one that checks first, inside
torch's own ``no_grad`` wrapper around them: so all ways to import them reach it. Torch has no other place where such a
call can be noticed. ``destroy()`` of the last engine restores torch's own.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from types import CellType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shoal.access.engine_parameters import EngineParameters
from shoal.engine.accumulation import Accumulation
from shoal.engine.parts.part import Part
from shoal.engine.sharding import Sharding
from shoal.errors import UsageError
from shoal.running.parameter_owner import OWNERS, ParameterOwner


class _Replaced(NamedTuple):
    """A function of torch that changes gradients."""

    wrapper: Any  # torch's no_grad wrapper, whose ``__wrapped__`` is the function
    name: str  # which scripts call
    do: str
    stacklevel: int  # of a warning, from the check to the script

    @property
    def cell(self) -> CellType:
        """The wrapper's variable that holds the function."""
        cells: tuple[CellType, ...] = self.wrapper.__closure__ or ()
        named: dict[str, CellType] = dict(zip(self.wrapper.__code__.co_freevars, cells, strict=True))
        return named.get("func", CellType())  # a torch that wraps in another way is not checked


_NORM = "engine.clip_grad_norm_(max_norm), or set gradient_clipping in the config; step() clips."
_REPLACED = (
    _Replaced(clip_grad._clip_grads_with_norm_, "clip_grad_norm_", f"call {_NORM}", 5),
    _Replaced(
        clip_grad.clip_grad_value_,
        "clip_grad_value_",
        "before step(), safe_set_full_grad(p, safe_get_full_grad(p).clamp(-value, value)) for each parameter that the"
        f" loss depends on; or clip the norm: {_NORM}",
        3,
    ),
)
_NORM_OF = _REPLACED[0]


class ClippingCheck:
    """Engines that live, and the replacement of torch's functions while there are any.

    A hook of torch looks at every optimizer's ``step()`` too: one that the script made next to an engine without an
    optimizer would update parameters by gradients of this rank alone.

    ``is_error``: False: a warning, as scripts written for DeepSpeed run with a call that does nothing.
    """

    def __init__(self) -> None:
        self.is_error = True
        self._steps: weakref.WeakKeyDictionary[ParameterOwner, Accumulation] = weakref.WeakKeyDictionary()
        self._untrained: weakref.WeakSet[ParameterOwner] = weakref.WeakSet()  # of engines without an optimizer
        self._step_hook: RemovableHandle | None = None
        self._lock = threading.Lock()

    def add(self, owner: ParameterOwner, accumulation: Accumulation, *, trains: bool) -> None:
        """An engine lives from now on, until ``remove``. ``trains``: it has an optimizer."""
        with self._lock:
            self._steps[owner] = accumulation
            if not trains:
                self._untrained.add(owner)
                if self._step_hook is None:
                    self._step_hook = register_optimizer_step_pre_hook(self._check_step)
            for replaced in _REPLACED:
                replaced.cell.cell_contents = partial(self._checked, replaced)

    def remove(self, owner: ParameterOwner) -> None:
        """The engine was destroyed. Idempotent."""
        with self._lock:
            self._steps.pop(owner, None)
            self._untrained.discard(owner)
            if not self._steps:
                if self._step_hook is not None:
                    self._step_hook.remove()
                    self._step_hook = None
                for replaced in _REPLACED:
                    replaced.cell.cell_contents = replaced.wrapper.__wrapped__

    def _checked(
        self, torchs: _Replaced, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        has_gradient = any(map(self._has_gradient, given))
        what = None
        if has_gradient and all(parameter.grad is None for parameter in given):
            what = f"{torchs.name}() has no effect on parameters of an engine: the engine holds their gradients."
        elif has_gradient and any(self._is_of_rank(parameter, torchs is _NORM_OF) for parameter in given):
            what = f"{torchs.name}() would clip each rank by its own gradients: parameter.grad has no others here."
        if what is not None:
            if self.is_error:
                raise UsageError(what, do=torchs.do, code="clip-engine")
            warnings.warn(f"{what} To clip, {torchs.do}", stacklevel=torchs.stacklevel)
        else:
            torchs.wrapper.__wrapped__(given, *args, **kwargs)

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before each ``step()`` of an optimizer.

        Raises: UsageError: it has parameters of an engine without an optimizer, on several ranks.
        """
        if any(self._is_untrained(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"step() of this {type(optimizer).__name__} would update each rank by its own gradients: the engine was"
                " made without an optimizer, so it sums none.",
                do="pass the optimizer to initialize(), and call engine.step().",
                code="optimizer-outside",
            )

    def _is_untrained(self, parameter: torch.Tensor) -> bool:
        """True if the parameter's gradient is this rank's alone."""
        owner = OWNERS.get(parameter)
        return parameter.grad is not None and owner in self._untrained and owner is not None and owner.comm.size > 1

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        owner = OWNERS.get(parameter)
        step = None if owner is None else self._steps.get(owner)
        return step is not None and step.has_backward

    def _is_of_rank(self, parameter: torch.Tensor, is_norm: bool) -> bool:
        """True if the gradient, or the norm over all that the script has, is this rank's alone."""
        owner = OWNERS.get(parameter)
        if not isinstance(owner, EngineParameters) or owner not in self._steps or parameter.grad is None:
            return False
        return not owner.shows_sum(parameter) or (is_norm and not owner.has_whole_model)


CLIPPING = ClippingCheck()


class CheckClipping(Part):
    """Checks torch's clipping from the start to the end of an engine."""

    def __init__(self, sharding: Sharding, accumulation: Accumulation) -> None:
        self._owner = sharding.access
        CLIPPING.add(self._owner, accumulation, trains=sharding.step is not None)

    def before_destroy(self) -> None:
        CLIPPING.remove(self._owner)
