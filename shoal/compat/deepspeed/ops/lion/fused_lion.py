"""``deepspeed.ops.lion.fused_lion``: Lion with DeepSpeed's default betas."""

from __future__ import annotations

from typing import Any

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.optim.lion import Lion


class FusedLion(Lion, metaclass=CountsOptimizers):
    """Lion.

    Args:
        set_grad_none: no effect: gradients are always released after the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


__all__ = ["FusedLion"]
