"""``deepspeed.ops.adam.cpu_adam``: torch's fused Adam, which is as good on host memory as on a device."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.compat.constructors import fused_where_possible, only_true
from shoal.optim.fp32_states import FP32States


class DeepSpeedCPUAdam(FP32States, torch.optim.Adam, metaclass=CountsOptimizers):
    """Adam, or with ``adamw_mode`` AdamW.

    Args:
        bias_correction: True: torch's Adam always corrects.
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            master weights, state is in fp32 in either case.

    Raises: OptimizerError: ``bias_correction`` is False.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        only_true("DeepSpeedCPUAdam", "bias_correction", bias_correction)
        params, is_fused = fused_where_possible(model_params)
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),  # type: ignore[arg-type]  # JSON gives a list; mypy forgets how many
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=is_fused,
            decoupled_weight_decay=adamw_mode,
        )
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states


__all__ = ["DeepSpeedCPUAdam"]
