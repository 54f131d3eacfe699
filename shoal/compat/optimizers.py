"""DeepSpeed's optimizer classes: torch's own and Shoal's, with DeepSpeed's signatures and default values.

torch's fused Adam is used on the device and on host memory. Lion has DeepSpeed's default betas, and LAMB is exact on
shards.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.compat.config_optimizers import CountsOptimizers
from shoal.errors import OptimizerError
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.variants import AdamWithBias, FP32States


class DeepSpeedCPUAdam(FP32States, AdamWithBias, metaclass=CountsOptimizers):
    """Adam, or with ``adamw_mode`` AdamW.

    Args:
        bias_correction: correct the running means for their start at zero.
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            main parameters, state is in fp32 in either case.
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
        arguments = adam_arguments(
            model_params,
            bias_correction=bias_correction,
            betas=betas,
            is_adamw=adamw_mode,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        super().__init__(**arguments)
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedAdam(AdamWithBias, metaclass=CountsOptimizers):
    """Adam, or with ``adam_w_mode`` AdamW.

    Args:
        bias_correction: correct the running means for their start at zero.
        set_grad_none: no effect: gradients are always released after the step.
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
        arguments = adam_arguments(
            params,
            bias_correction=bias_correction,
            betas=betas,
            is_adamw=adam_w_mode,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        super().__init__(**arguments)
        self.adam_w_mode = int(adam_w_mode)


class DeepSpeedCPUAdagrad(FP32States, torch.optim.Adagrad, metaclass=CountsOptimizers):
    """Adagrad.

    Args:
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            main parameters, state is in fp32 in either case.

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


class DeepSpeedCPULion(FP32States, Lion, metaclass=CountsOptimizers):
    """Lion.

    Args:
        fp32_optimizer_states: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32
            main parameters, state is in fp32 in either case.
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


def fused_where_possible(params: Any) -> tuple[Any, bool | None]:
    """The parameters or groups, and whether torch's fused step supports them (None: let torch choose).

    Group dicts are not copied, so the caller sees later changes of the rate in them.
    """
    entries = list(params)
    tensors: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            entry["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
            tensors += entry["params"]
        else:
            tensors.append(entry)
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in tensors]
    can = all(tensor.is_floating_point() and tensor.device.type in ("cpu", "cuda") for tensor in plain)
    return entries, True if can and plain else None


def adam_arguments(params: Any, *, betas: Any, is_adamw: bool, **others: Any) -> dict[str, Any]:
    """The arguments of ``AdamWithBias`` for a class of DeepSpeed's: fused where possible."""
    params, is_fused = fused_where_possible(params)
    betas = tuple(betas)  # JSON gives a list
    return {"params": params, "betas": betas, "fused": is_fused, "decoupled_weight_decay": is_adamw, **others}


def only_false(name: str, option: str, value: Any, do: str = "leave it out.") -> None:
    """Raises: OptimizerError: the option asks for something that Shoal does not have."""
    if value:
        raise OptimizerError(f"{name}({option}={value}): there is no such option.", do=do, code="optimizer-params")
