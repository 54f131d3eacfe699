"""``deepspeed.ops.lion.cpu_lion``: Lion with DeepSpeed's default betas."""

from __future__ import annotations

from typing import Any

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.optim.fp32_states import FP32States
from shoal.optim.lion import Lion


class DeepSpeedCPULion(FP32States, Lion, metaclass=CountsOptimizers):
    """Lion.

    Args:
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            master weights, state is in fp32 in either case.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


__all__ = ["DeepSpeedCPULion"]
