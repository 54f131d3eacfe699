"""DeepSpeed's builders of compiled operators. They build nothing: ``load()`` gives torch's functions under its names.

    create_adam(0, lr, beta1, beta2, eps, weight_decay, adamw_mode, should_log)       an optimizer by number
    adam_update(0, step, lr, ..., parameter, gradient, exp_avg, exp_avg_sq)           one step, in place

Tensors are of any shape; the arithmetic is fp32. Each function returns 0. The optimizers' operators, files and pinned
memory are there; what a builder of another operator would load is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shoal.compat.absent import not_built
from shoal.compat.async_io import AsyncIoHandle, PinHandle
from shoal.errors import UsageError

Tensor = torch.Tensor


class _Made:
    """The optimizers of one kind that a script has created, by number, with whether weight decay is decoupled."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._by_number: dict[int, bool] = {}

    def create(self, number: int, *arguments: Any) -> int:
        """``arguments``: default values, which each update is given anew; of Adam the last but one is the mode."""
        self._by_number[number] = bool(arguments[-2]) if self._kind == "adam" else False
        return 0

    def destroy(self, number: int) -> int:
        self._by_number.pop(number, None)
        return 0

    def is_decoupled(self, number: int) -> bool:
        if number not in self._by_number:
            raise UsageError(f"there is no {self._kind} optimizer {number}.", do=f"call create_{self._kind}() first.")
        return self._by_number[number]


@dataclass(frozen=True)
class AdamStep:
    """One step of Adam, forwards and backwards."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    corrects_bias: bool
    is_decoupled: bool

    def _change(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
        first = 1 - self.beta1**self.step if self.corrects_bias else 1.0
        second = math.sqrt(1 - self.beta2**self.step) if self.corrects_bias else 1.0
        return exp_avg.float() / (exp_avg_sq.float().sqrt() / second + self.eps) * (self.lr / first)

    @property
    def _kept(self) -> float:
        """The share of the parameter that decoupled weight decay leaves."""
        return 1 - self.lr * self.weight_decay if self.is_decoupled else 1.0

    def _gradient(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        return gradient.float() if self.is_decoupled else gradient.float() + self.weight_decay * parameter.float()

    def apply(self, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        gradient = self._gradient(gradient, parameter)
        exp_avg.copy_(self.beta1 * exp_avg.float() + (1 - self.beta1) * gradient)
        exp_avg_sq.copy_(self.beta2 * exp_avg_sq.float() + (1 - self.beta2) * gradient.square())
        parameter.copy_(parameter.float() * self._kept - self._change(exp_avg, exp_avg_sq))

    def undo(self, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Restore what was there before ``apply`` with the same gradient, but for rounding."""
        parameter.copy_((parameter.float() + self._change(exp_avg, exp_avg_sq)) / self._kept)
        gradient = self._gradient(gradient, parameter)
        exp_avg.copy_((exp_avg.float() - (1 - self.beta1) * gradient) / self.beta1)
        exp_avg_sq.copy_(((exp_avg_sq.float() - (1 - self.beta2) * gradient.square()) / self.beta2).clamp(min=0))


def _cpu_adam() -> SimpleNamespace:
    made = _Made("adam")

    def calling(apply: Callable[..., None]) -> Callable[..., int]:
        @torch.no_grad()
        def call(
            number: int,
            step: int,
            lr: float,
            beta1: float,
            beta2: float,
            eps: float,
            decay: float,
            corrects: bool,
            *tensors: Tensor,
        ) -> int:
            apply(AdamStep(step, lr, beta1, beta2, eps, decay, corrects, made.is_decoupled(number)), *tensors)
            return 0

        return call

    return SimpleNamespace(
        create_adam=made.create,
        adam_update=calling(AdamStep.apply),
        adam_rollback=calling(AdamStep.undo),
        destroy_adam=made.destroy,
    )


def _cpu_adagrad() -> SimpleNamespace:
    made = _Made("adagrad")

    @torch.no_grad()
    def adagrad_update(
        number: int, step: int, lr: float, eps: float, decay: float, parameter: Tensor, gradient: Tensor, total: Tensor
    ) -> int:
        made.is_decoupled(number)
        gradient = gradient.float() + decay * parameter.float()
        total.add_(gradient.square())
        parameter.copy_(parameter.float() - lr * gradient / (total.float().sqrt() + eps))
        return 0

    return SimpleNamespace(create_adagrad=made.create, adagrad_update=adagrad_update, destroy_adagrad=made.destroy)


def _cpu_lion() -> SimpleNamespace:
    made = _Made("lion")

    @torch.no_grad()
    def lion_update(
        number: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        decay: float,
        parameter: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
    ) -> int:
        made.is_decoupled(number)
        direction = (beta1 * exp_avg.float() + (1 - beta1) * gradient.float()).sign()
        parameter.copy_(parameter.float() * (1 - lr * decay) - lr * direction)
        exp_avg.copy_(beta2 * exp_avg.float() + (1 - beta2) * gradient.float())
        return 0

    return SimpleNamespace(create_lion=made.create, lion_update=lion_update, destroy_lion=made.destroy)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensors: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam over lists of gradients, parameters, exp_avg and exp_avg_sq; nothing where ``noop_flag`` is set.

    ``mode`` 1: weight decay is decoupled (AdamW); 0: it is added to the gradient.
    """
    if bool(noop_flag.any()):
        return
    rule = AdamStep(step, lr, beta1, beta2, eps, weight_decay, bool(bias_correction), mode == 1)
    for gradient, parameter, exp_avg, exp_avg_sq in zip(*tensors, strict=True):
        rule.apply(parameter, gradient, exp_avg, exp_avg_sq)


# operator -> its module
MODULES: dict[str, SimpleNamespace] = {
    "cpu_adam": _cpu_adam(),
    "cpu_adagrad": _cpu_adagrad(),
    "cpu_lion": _cpu_lion(),
    "fused_adam": SimpleNamespace(multi_tensor_adam=multi_tensor_adam),
    "async_io": SimpleNamespace(aio_handle=AsyncIoHandle),
    "pin_memory": SimpleNamespace(pin_handle=PinHandle),
}


class OpBuilder:
    """One operator, by name."""

    NAME = "none"
    IS_THERE = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{FOLDERS.get(self.NAME, 'comm')}.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if Shoal has the operator's function."""
        return self.IS_THERE

    def load(self, verbose: bool = True) -> Any:
        """The operator's functions. Nothing is compiled. Raises: NotBuiltError: Shoal does not have them."""
        if self.NAME in MODULES:
            return MODULES[self.NAME]
        raise not_built(
            f"the compiled operator {self.name!r}",
            "use the optimizer classes of deepspeed.ops themselves, or torch's functions: nothing is compiled here.",
        )

    def jit_load(self, verbose: bool = True) -> Any:
        """As ``load``."""
        return self.load(verbose)


# Where DeepSpeed has an operator, below ``deepspeed.ops``.
FOLDERS = {
    "cpu_adam": "adam",
    "cpu_adagrad": "adagrad",
    "cpu_lion": "lion",
    "fused_adam": "adam",
    "async_io": "aio",
    "pin_memory": "pin_memory",
}
CUDAOpBuilder = CPUOpBuilder = OpBuilder

# The operator that each class is for.
_OPERATORS = {
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "AsyncIOBuilder": "async_io",
    "GDSBuilder": "gds",
    "UtilsBuilder": "utils",
    "TransformerBuilder": "transformer",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "QuantizerBuilder": "quantizer",
    "FPQuantizerBuilder": "fp_quantizer",
    "RandomLTDBuilder": "random_ltd",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "SpatialInferenceBuilder": "spatial_inference",
    "EvoformerAttnBuilder": "evoformer_attn",
    "SparseAttnBuilder": "sparse_attn",
    "DeepCompileBuilder": "dc",
    "PinMemoryBuilder": "pin_memory",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "NotImplementedBuilder": "deepspeed_not_implemented",
}
_THERE = {*MODULES, "fused_lamb", "fused_lion"}
BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": operator, "IS_THERE": operator in _THERE, "__module__": __name__})
    for name, operator in _OPERATORS.items()
}
globals().update(BUILDERS)

__op_builders__ = [builder() for builder in BUILDERS.values()]
ALL_OPS = {builder.name: builder for builder in __op_builders__ if builder.name != "deepspeed_not_implemented"}
__compatible_ops__ = {builder.name: builder.is_compatible() for builder in __op_builders__}
