"""``deepspeed.ops.adam.fused_adam``: torch's fused Adam."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.compat.constructors import fused_where_possible, only_true


class FusedAdam(torch.optim.Adam, metaclass=CountsOptimizers):
    """Adam, or with ``adam_w_mode`` AdamW.

    Args:
        bias_correction: True: torch's Adam always corrects.
        set_grad_none: no effect: gradients are always released after the step.

    Raises: OptimizerError: ``bias_correction`` is False.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        only_true("FusedAdam", "bias_correction", bias_correction)
        params, is_fused = fused_where_possible(params)
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),  # type: ignore[arg-type]  # JSON gives a list; mypy forgets how many
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=is_fused,
            decoupled_weight_decay=adam_w_mode,
        )
        self.adam_w_mode = int(adam_w_mode)


__all__ = ["FusedAdam"]
