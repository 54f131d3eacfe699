"""Lion: the sign of an interpolated momentum. Elementwise, one state per element.

    u = sign(b1 m + (1 - b1) g)        w = w - lr (u + weight_decay w)        m = b2 m + (1 - b2) g

Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2 (arXiv:2302.06675).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.optim.options import check_options, refuse_sparse


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay.

    Memory: one tensor like each parameter, and one more during the step.
    Raises: OptimizerError: a number outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_options("Lion", not_negative={"lr": lr, "weight_decay": weight_decay}, betas=betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights, grads, averages = [], [], []
            for param in group["params"]:
                if param.grad is None:
                    continue
                refuse_sparse("Lion", param)
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                weights.append(param)
                grads.append(param.grad.to(param.dtype))
                averages.append(state["exp_avg"])
            if weights:
                _update(weights, grads, averages, group)
        return loss


def _update(
    weights: list[torch.Tensor], grads: list[torch.Tensor], averages: list[torch.Tensor], group: dict[str, Any]
) -> None:
    lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    directions = torch._foreach_mul(averages, beta1)
    torch._foreach_add_(directions, grads, alpha=1 - beta1)
    torch._foreach_sign_(directions)
    if weight_decay:
        torch._foreach_add_(directions, weights, alpha=weight_decay)
    torch._foreach_mul_(directions, lr)
    torch._foreach_sub_(weights, directions)
    torch._foreach_mul_(averages, beta2)
    torch._foreach_add_(averages, grads, alpha=1 - beta2)
