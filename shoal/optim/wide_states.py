"""State in fp32 for weights in 16 bit: what a torch optimizer becomes when it is derived from ``WideStates`` too.

    weight (bf16) -> fp32 \\
    gradient      -> fp32  > the optimizer's own step, in fp32 -> weight, rounded to bf16
    state (fp32)          /

torch's optimizers keep state in the weight's format, where a second moment's small changes are rounded away. Shards
with fp32 master weights have state in fp32 anyhow, and are stepped as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_NARROW = (torch.float16, torch.bfloat16)


class WideStates(torch.optim.Optimizer):
    """Mixed in before one of torch's optimizers.

    Memory: the state, 4 bytes an element; during a step the largest 16-bit weight twice in fp32.
    """

    fp32_optimizer_states = True  # False: state in the format of the weight

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Not the decorated function: its hooks run around this one already. (To mypy a method has no __func__.)
        step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        groups = [list(group["params"]) for group in self.param_groups]
        if not self.fp32_optimizer_states or not any(p.dtype in _NARROW for params in groups for p in params):
            return step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = [p for p in params if p.dtype not in _NARROW]
            step(self)
            for group in self.param_groups:
                group["params"] = []
            for group, params in zip(self.param_groups, groups, strict=True):
                for param in params:
                    if param.dtype in _NARROW and param.grad is not None:
                        self._step_narrow(step, group, param)
        finally:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = params
        return loss

    def _step_narrow(self, step: Callable[..., Any], group: dict[str, Any], param: torch.Tensor) -> None:
        assert param.grad is not None
        wide = torch.nn.Parameter(param.float())
        wide.grad = param.grad.float()
        self.state[wide] = {key: _widened(value, param) for key, value in self.state.pop(param, {}).items()}
        group["params"] = [wide]
        try:
            step(self)
            param.copy_(wide)
        finally:
            self.state[param] = self.state.pop(wide)
            group["params"] = []


def _widened(value: Any, param: torch.Tensor) -> Any:
    """An entry of the state: what has a number for each of the weight's, in fp32."""
    is_like = isinstance(value, torch.Tensor) and value.dtype in _NARROW and value.shape == param.shape
    return value.float() if is_like else value
