"""fp32 optimizer state for 16-bit weights: a mixin for torch's optimizers.

    weight (bf16) -> fp32 \\
    gradient      -> fp32  > the optimizer's own step, in fp32 -> weight, rounded to bf16
    state (fp32)          /

torch's optimizers keep state in the weight's dtype, where a second moment's small changes are rounded away. Shards
with fp32 main parameters have fp32 state in any case, and are stepped without casts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class FP32States(torch.optim.Optimizer):
    """Mixin, named before one of torch's optimizers.

    Memory: the state, 4 bytes an element; during a step the largest 16-bit weight twice in fp32.
    """

    fp32_optimizer_states = True  # False: state in the dtype of the weight

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Not the decorated function: its hooks already run around this one. (For mypy a method has no __func__.)
        step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        groups = [list(group["params"]) for group in self.param_groups]
        if not self.fp32_optimizer_states or not any(p.dtype in _LOW_PRECISION for params in groups for p in params):
            return step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = [p for p in params if p.dtype not in _LOW_PRECISION]
            step(self)
            for group in self.param_groups:
                group["params"] = []
            for group, params in zip(self.param_groups, groups, strict=True):
                for param in params:
                    if param.dtype in _LOW_PRECISION and param.grad is not None:
                        self._step_low_precision(step, group, param)
        finally:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = params
        return loss

    def _step_low_precision(self, step: Callable[..., Any], group: dict[str, Any], param: torch.Tensor) -> None:
        assert param.grad is not None
        main = torch.nn.Parameter(param.float())
        main.grad = param.grad.float()
        self.state[main] = {key: _in_fp32(value, param) for key, value in self.state.pop(param, {}).items()}
        group["params"] = [main]
        try:
            step(self)
            param.copy_(main)
        finally:
            self.state[param] = self.state.pop(main)
            group["params"] = []


def _in_fp32(value: Any, param: torch.Tensor) -> Any:
    """An entry of the state; in fp32 if it has one element per element of the weight."""
    is_like = isinstance(value, torch.Tensor) and value.dtype in _LOW_PRECISION and value.shape == param.shape
    return value.float() if is_like else value
