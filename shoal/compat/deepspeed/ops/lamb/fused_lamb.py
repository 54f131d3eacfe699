"""``deepspeed.ops.lamb.fused_lamb``: LAMB, exact on shards."""

from __future__ import annotations

from typing import Any

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.compat.constructors import only_false
from shoal.optim.lamb import Lamb


class FusedLamb(Lamb, metaclass=CountsOptimizers):
    """LAMB. Raises: OptimizerError: ``amsgrad``, or a ``max_grad_norm``: gradients are clipped by the engine."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        only_false("FusedLamb", "amsgrad", amsgrad)
        only_false("FusedLamb", "max_grad_norm", max_grad_norm, do="set gradient_clipping in the config.")
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            eps_inside_sqrt=eps_inside_sqrt,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


__all__ = ["FusedLamb"]
