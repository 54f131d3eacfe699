"""``torch.nn.utils.clip_grad_norm_`` on parameters of an engine is an error, where it would clip nothing.

An engine moves the gradient of a parameter to its buffer as soon as it is complete, so on several ranks torch's
function finds none: it would change nothing and return a norm of 0, as under DeepSpeed. Where the gradients are on the
parameters (one rank) it clips them.

While an engine lives, the function of torch that scales the gradients is replaced by one that checks first. All ways to
import ``clip_grad_norm_`` reach it. ``destroy()`` of the last engine restores torch's own.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from shoal.engine.accumulation import Accumulation
from shoal.errors import UsageError
from shoal.zero.parameter_owner import OWNERS, ParameterOwner

_WHAT = "clip_grad_norm_() has no effect on parameters of an engine: the engine holds their gradients."
_DO = "call engine.clip_grad_norm_(max_norm), or set gradient_clipping in the config; step() clips."


class ClippingCheck:
    """Engines that live, and the replacement of torch's function while there are any.

    ``is_error``: False: a warning, as scripts written for DeepSpeed run with a call that does nothing.
    """

    def __init__(self) -> None:
        self.is_error = True
        self._steps: weakref.WeakKeyDictionary[ParameterOwner, Accumulation] = weakref.WeakKeyDictionary()
        self._torchs: Callable[..., None] | None = None  # None: not replaced
        self._lock = threading.Lock()

    def add(self, owner: ParameterOwner, accumulation: Accumulation) -> None:
        """An engine lives from now on, until ``remove``."""
        with self._lock:
            self._steps[owner] = accumulation
            if self._torchs is None:
                self._torchs = clip_grad._clip_grads_with_norm_
                clip_grad._clip_grads_with_norm_ = self._checked

    def remove(self, owner: ParameterOwner) -> None:
        """The engine was destroyed. Idempotent."""
        with self._lock:
            self._steps.pop(owner, None)
            if not self._steps and clip_grad._clip_grads_with_norm_ == self._checked:
                assert self._torchs is not None
                clip_grad._clip_grads_with_norm_, self._torchs = self._torchs, None

    def _checked(self, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if all(parameter.grad is None for parameter in given) and any(map(self._has_gradient, given)):
            if self.is_error:
                raise UsageError(_WHAT, do=_DO, code="clip-engine")
            warnings.warn(f"{_WHAT} To clip, {_DO}", stacklevel=4)
        assert self._torchs is not None
        self._torchs(given, *args, **kwargs)

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        owner = OWNERS.get(parameter)
        step = None if owner is None else self._steps.get(owner)
        return step is not None and step.has_backward


CLIPPING = ClippingCheck()
