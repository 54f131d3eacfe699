"""DeepSpeed's optimizer classes: torch's own and Shoal's, with DeepSpeed's signatures and default values.

torch's fused Adam is used on the device and on host memory. Lion has DeepSpeed's default betas, and LAMB is exact on
shards. Optimizers that the config names are torch's, and instances of the classes that DeepSpeed would have built:
scripts ask ``isinstance(optimizer, FusedAdam)`` and read ``adam_w_mode``.

    "type"         on the device     with offload_optimizer
    Adam, AdamW    FusedAdam         DeepSpeedCPUAdam
    Lion           FusedLion         DeepSpeedCPULion
    Adagrad        (torch's)         DeepSpeedCPUAdagrad
    Lamb           FusedLamb         FusedLamb
    OneBitAdam     OnebitAdam        (an error; so are ZeroOneAdam and OneBitLamb)

``fp32_optimizer_states``: state of 16-bit parameters is in fp32; False: in their format. Where an engine has fp32 main
parameters, state is in fp32 in either case. ``set_grad_none`` has no effect: gradients are always released after the
step. ``bias_correction``: correct the running means for their start at zero.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.config import Config
from shoal.errors import OptimizerError
from shoal.optim import one_bit
from shoal.optim.lamb import Lamb
from shoal.optim.lion import Lion
from shoal.optim.one_bit_lamb import OneBitLamb
from shoal.optim.variants import AdamWithBias, FP32States
from shoal.running.optimizer import ShardedOptimizer

_STANDS_FOR = "stands_for"  # the name of a class of DeepSpeed's, on the optimizer
ON_DEVICE = {
    "adam": "FusedAdam",
    "adamw": "FusedAdam",
    "lion": "FusedLion",
    "lamb": "FusedLamb",
    "onebitadam": "OnebitAdam",
    "zerooneadam": "ZeroOneAdam",
    "onebitlamb": "OnebitLamb",
}
ON_HOST = {
    "adam": "DeepSpeedCPUAdam",
    "adamw": "DeepSpeedCPUAdam",
    "lion": "DeepSpeedCPULion",
    "adagrad": "DeepSpeedCPUAdagrad",
    "lamb": "FusedLamb",
}


class CountsOptimizers(type):
    """A class of DeepSpeed's, whose instances are also the optimizers that were marked as it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        wrapped = instance.optimizer if isinstance(instance, ShardedOptimizer) else instance
        return isinstance(wrapped, torch.optim.Optimizer) and vars(wrapped).get(_STANDS_FOR) == cls.__name__


class _FusedWherePossible(AdamWithBias):
    """Adam, or AdamW, by torch's fused step where that supports the parameters."""

    def __init__(self, params: Any, *, betas: Any, is_adamw: bool, **options: Any) -> None:
        params, is_fused = fused_where_possible(params)
        betas = tuple(betas)  # JSON gives a list
        super().__init__(params, betas=betas, fused=is_fused, decoupled_weight_decay=is_adamw, **options)


class DeepSpeedCPUAdam(FP32States, _FusedWherePossible, metaclass=CountsOptimizers):
    """Adam, or with ``adamw_mode`` AdamW."""

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
        options = {"lr": lr, "bias_correction": bias_correction, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model_params, betas=betas, is_adamw=adamw_mode, amsgrad=amsgrad, **options)
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedAdam(_FusedWherePossible, metaclass=CountsOptimizers):
    """Adam, or with ``adam_w_mode`` AdamW."""

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
        options = {"lr": lr, "bias_correction": bias_correction, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, betas=betas, is_adamw=adam_w_mode, amsgrad=amsgrad, **options)
        self.adam_w_mode = int(adam_w_mode)


class DeepSpeedCPUAdagrad(FP32States, torch.optim.Adagrad, metaclass=CountsOptimizers):
    """Adagrad. Raises: OptimizerError: ``amsgrad`` is True."""

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
    """Lion."""

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
    """Lion."""

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
        adam = lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay
        super().__init__(params, *adam, max_coeff, min_coeff)


class OnebitAdam(one_bit.OneBitAdam, metaclass=CountsOptimizers):
    """1-bit Adam. Raises: OptimizerError: an option that it does not have; gradients are clipped by the engine."""

    def __init__(self, params: Any, deepspeed: Any = None, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, **_one_bit_arguments("OnebitAdam", options))


class ZeroOneAdam(one_bit.ZeroOneAdam, metaclass=CountsOptimizers):
    """0/1 Adam. Raises: as ``OnebitAdam``."""

    def __init__(self, params: Any, deepspeed: Any = None, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, **_one_bit_arguments("ZeroOneAdam", options))


class OnebitLamb(OneBitLamb, metaclass=CountsOptimizers):
    """1-bit LAMB. Raises: as ``OnebitAdam``."""

    def __init__(self, params: Any, deepspeed: Any = None, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, lr, **_one_bit_arguments("OnebitLamb", options))


def _one_bit_arguments(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What Shoal's class takes of DeepSpeed's options. The engine communicates, whatever library is named."""
    only_false(name, "amsgrad", options.pop("amsgrad", False))
    only_false(name, "max_grad_norm", options.pop("max_grad_norm", 0.0), do="set gradient_clipping in the config.")
    if name != "OnebitLamb":
        only_false(name, "eps_inside_sqrt", options.pop("eps_inside_sqrt", False))
    return {key: value for key, value in options.items() if key not in ("cuda_aware", "comm_backend_name")}


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


def only_false(name: str, option: str, value: Any, do: str = "leave it out.") -> None:
    """Raises: OptimizerError: the option asks for something that Shoal does not have."""
    if value:
        raise OptimizerError(f"{name}({option}={value}): there is no such option.", do=do, code="optimizer-params")


def mark(optimizer: ShardedOptimizer, config: Config) -> None:
    """Mark an optimizer that the config named as an instance of DeepSpeed's class."""
    section = config.optimizer
    if section is None or not section.type or dict(section.params).get("torch_adam"):
        return
    is_on_host = config.zero_optimization.offload_optimizer.device != "none"
    name = (ON_HOST if is_on_host else ON_DEVICE).get(section.type.lower())
    if name is None:
        return
    setattr(optimizer.optimizer, _STANDS_FOR, name)
    if name in ("FusedAdam", "DeepSpeedCPUAdam"):
        is_decoupled = isinstance(optimizer.optimizer, torch.optim.AdamW)
        # Scripts read it; torch's own class has no such attribute.
        optimizer.optimizer.adam_w_mode = is_decoupled  # type: ignore[attr-defined]
