"""Number formats: ``fp16``, ``bf16``, ``torch_autocast``, ``data_types``, ``amp`` and Shoal's own ``precision``."""

from __future__ import annotations

from typing import Literal

from shoal.config.base import Auto, Dtype, Section, key
from shoal.config.unsupported import with_unsupported


class Fp16(Section):
    """Half precision with fp32 main parameters and a loss scale."""

    enabled: bool = key(False, "16-bit (fp16) weights and gradients, fp32 main parameters, scaled loss")
    auto_cast: bool = key(False, "cast floating-point inputs of the model to fp16")
    loss_scale: float = key(0.0, "a fixed loss scale; 0 means that the scale adapts itself", ge=0, allow_inf_nan=False)
    initial_scale_power: int = key(16, "the adaptive scale starts at 2 to this power", ge=0)
    loss_scale_window: int = key(1000, "steps without overflow before the scale doubles", gt=0)
    hysteresis: int = key(2, "overflows tolerated before the scale is halved", ge=0)
    consecutive_hysteresis: bool = key(False, "a step without overflow restores the tolerated overflows")
    min_loss_scale: float = key(1.0, "the scale never falls below this", gt=0, allow_inf_nan=False)
    fp16_master_weights_and_grads: bool = key(False, "no fp32 main parameters: the optimizer updates fp16")


class Bf16(Section):
    """bfloat16 with fp32 main parameters."""

    enabled: bool = key(False, "bfloat16 weights and gradients, fp32 main parameters")
    immediate_grad_update: bool = key(False, "apply each gradient as soon as it is computed")
    check_grad_overflow: bool = key(True, "check gradients for infinity and NaN before the step")
    bf16_master_weights_and_grads: bool = key(False, "no fp32 main parameters: the optimizer updates bfloat16")
    bf16_optimizer_states: bool = key(False, "optimizer state in bfloat16 too; needs bf16_master_weights_and_grads")


class TorchAutocast(Section):
    """`torch.autocast` around the forward pass."""

    enabled: bool = key(False, "run the forward pass under torch.autocast")
    dtype: Dtype | None = key(None, "autocast's dtype; null is bf16")
    lower_precision_safe_modules: tuple[str, ...] | None = key(
        None,
        "classes whose gradients are reduced in autocast's dtype; null: none (DeepSpeed: Linear, Conv1d to 3d)",
    )


class DataTypes(Section):
    """Number formats of single kinds of state."""

    grad_accum_dtype: Dtype | None = key(
        None,
        "format in which gradients of several micro-batches are summed; null is fp32 where there are fp32 main"
        " parameters and more than one micro-batch, else that of the parameters (DeepSpeed: always that)",
    )
    param_dtype: Dtype | None = key(None, "format of the parameters; must equal that of fp16 or bf16")
    buffer_dtype: Dtype | None = key(
        None, "format of floating-point buffers of the model; null: their own (a batch norm's: that of the parameters)"
    )
    keep_in_fp32_modules: tuple[str, ...] | Auto = key(
        "auto",
        "names of buffers that stay in fp32 beside 16-bit parameters, `*` for any text; auto: those that the model"
        " names in `_keep_in_fp32_modules_strict` (under fp16 also in `_keep_in_fp32_modules`)",
    )


@with_unsupported("precision")
class PrecisionSection(Section):
    """Shoal's own: formats of communication and state, and what a number that is not finite does."""

    reduce_dtype: Dtype | None = key(
        None, "format in which gradients are reduced; communication_data_type has priority"
    )
    nonfinite: Literal["raise", "skip", "warn"] | None = key(
        None,
        "what a NaN or infinite loss or gradient does: stop, skip the step, or warn and continue; null: by precision",
    )
