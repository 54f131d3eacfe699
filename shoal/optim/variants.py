"""torch's optimizers with one option more each: Adam without bias correction, and fp32 state for 16-bit weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch


class AdamWithBias(torch.optim.Adam):
    """Adam, or AdamW with ``decoupled_weight_decay``, whose groups may have ``bias_correction: False``.

        corrected       m / (1 - b1^t), v / (1 - b2^t)        as torch's Adam, and its default here
        uncorrected     m, v                                  the same with an infinite t

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, section 3 (arXiv:1412.6980).
    """

    def __init__(self, params: Any, *, bias_correction: bool = True, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    # torch's step() calls it, and computes with the counts that it puts into ``state_steps``.
    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        result = super()._init_group(group, *lists)
        state_steps: list[torch.Tensor] = lists[-1]
        if not group.get("bias_correction", True) and state_steps:
            torch._foreach_add_(state_steps, 1)
            state_steps[:] = [torch.full_like(step, math.inf) for step in state_steps]
        return result


_LOW_PRECISION = (torch.float16, torch.bfloat16)


class FP32States(torch.optim.Optimizer):
    """Mixin, named before one of torch's optimizers.

        weight (bf16) -> fp32 \\
        gradient      -> fp32  > the optimizer's own step, in fp32 -> weight, rounded to bf16
        state (fp32)          /

    torch's optimizers keep state in the weight's dtype, where a second moment's small changes are rounded away. Shards
    with fp32 main parameters have fp32 state in any case, and are stepped without casts.

    Memory: the state, 4 bytes an element; during a step the largest 16-bit weight twice in fp32.
    """

    fp32_optimizer_states = True  # False: state in the dtype of the weight
    may_cast = True  # False: all that it steps is fp32, as main parameters are

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
