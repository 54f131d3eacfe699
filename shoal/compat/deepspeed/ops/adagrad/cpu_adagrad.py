"""``deepspeed.ops.adagrad.cpu_adagrad``: torch's Adagrad."""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.compat.constructors import only_false
from shoal.optim.fp32_states import FP32States


class DeepSpeedCPUAdagrad(FP32States, torch.optim.Adagrad, metaclass=CountsOptimizers):
    """Adagrad.

    Args:
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            master weights, state is in fp32 in either case.

    Raises: OptimizerError: ``amsgrad`` is True.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        only_false("DeepSpeedCPUAdagrad", "amsgrad", amsgrad)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


__all__ = ["DeepSpeedCPUAdagrad"]
