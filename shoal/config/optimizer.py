"""``optimizer`` and ``scheduler``, and the parameters of each kind that DeepSpeed names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from shoal.config.base import Section, key

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]
WarmupType = Literal["log", "linear"]


class TypeAndParams(Section):
    """A type's name and the arguments of its constructor; unpacks as ``type, params = section``."""

    type: str | None = key(None, "name, in any case")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of its constructor")

    # pydantic's own goes over (name, value); a section of two is unpacked as its values.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter((self.type, self.params))


class Optimizer(TypeAndParams):
    """The optimizer to build, if none is passed to ``initialize``."""

    type: str | None = key(None, "Adam, AdamW, SGD, Adagrad, Lion, Lamb, Muon, or any name of torch.optim; in any case")
    params: dict[str, Any] = key({}, "arguments of the optimizer's constructor")
    legacy_fusion: bool = key(False, "DeepSpeed's old flat fp16 optimizer")


class Scheduler(TypeAndParams):
    """The learning-rate schedule to build, if none is passed to ``initialize``."""

    type: str | None = key(
        None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or any name of torch.optim.lr_scheduler"
    )
    params: dict[str, Any] = key({}, "arguments of the schedule's constructor")


class CommonParams(Section):
    """Arguments that most optimizers share."""

    lr: float = key(1e-3, "learning rate", ge=0)
    weight_decay: float = key(0.0, "weight decay", ge=0)
    maximize: bool = key(False, "climb instead of descend")
    foreach: bool | None = key(None, "torch's for-each implementation; null: torch decides")
    fused: bool | None = key(None, "torch's fused implementation; null: where there is one")
    capturable: bool = key(False, "safe to capture in a CUDA graph")
    differentiable: bool = key(False, "record the step for autograd")


class AdamParams(CommonParams):
    """Adam and AdamW."""

    betas: Betas = key((0.9, 0.999), "decay of the running means of the gradient and of its square")
    eps: float = key(1e-8, "added to the denominator", ge=0)
    bias_correction: bool = key(True, "correct the running means for their start at zero")
    amsgrad: bool = key(False, "keep the maximum of the second moment")
    adam_w_mode: bool = key(True, "decoupled weight decay; true for DeepSpeed's Adam too, so Adam means AdamW")
    torch_adam: bool = key(False, "use torch's own Adam")
    fp32_optimizer_states: bool = key(True, "state in fp32 for the host's optimizer")
    set_grad_none: bool = key(True, "drop gradients instead of filling them with zeros")


class AdagradParams(CommonParams):
    """Adagrad."""

    lr: float = key(1e-2, "learning rate", ge=0)
    eps: float = key(1e-10, "added to the denominator", ge=0)
    lr_decay: float = key(0.0, "decay of the learning rate by step", ge=0)
    initial_accumulator_value: float = key(0.0, "first value of the sum of squares", ge=0)
    fp32_optimizer_states: bool = key(True, "state in fp32 for the host's optimizer")


class SgdParams(CommonParams):
    """SGD."""

    momentum: float = key(0.0, "momentum", ge=0)
    dampening: float = key(0.0, "dampening of the momentum")
    nesterov: bool = key(False, "Nesterov's momentum")


class LionParams(CommonParams):
    """Lion."""

    betas: Betas = key((0.9, 0.999), "weights of the update and of the running mean")
    fp32_optimizer_states: bool = key(True, "state in fp32 for the host's optimizer")
    set_grad_none: bool = key(True, "drop gradients instead of filling them with zeros")


class LambParams(CommonParams):
    """LAMB."""

    betas: Betas = key((0.9, 0.999), "decay of the running means of the gradient and of its square")
    eps: float = key(1e-8, "added to the denominator", ge=0)
    eps_inside_sqrt: bool = key(False, "add eps under the square root")
    bias_correction: bool = key(True, "correct the running means for their start at zero")
    amsgrad: bool = key(False, "keep the maximum of the second moment")
    max_coeff: float = key(10.0, "largest trust ratio", gt=0)
    min_coeff: float = key(0.01, "smallest trust ratio", gt=0)


class MuonParams(CommonParams):
    """Muon for matrices, Adam for the other parameters."""

    momentum: float = key(0.95, "momentum of the matrices' update", ge=0)
    nesterov: bool = key(True, "Nesterov's momentum")
    muon_lr: float | None = key(None, "learning rate of the matrices; null is lr", ge=0)
    adam_lr: float | None = key(None, "learning rate of the others; null is lr", ge=0)
    betas: Betas = key((0.9, 0.999), "Adam's, for the others")
    eps: float = key(1e-8, "Adam's, for the others", ge=0)
    ns_method: Literal["gram", "standard"] = key("gram", "how the Newton-Schulz iteration is computed")
    ns_steps: int = key(5, "iterations of Newton-Schulz", ge=1)
    adam_w_mode: bool = key(True, "decoupled weight decay; always, for the others")
    torch_adam: bool = key(False, "use torch's own Adam for the others")
    fp32_optimizer_states: bool = key(True, "state in fp32 for the host's optimizer")


class OneBitAdamParams(AdamParams):
    """1-bit Adam."""

    freeze_step: int = key(100_000, "steps before the communication is compressed", ge=0)
    cuda_aware: bool = key(False, "the MPI library reads device memory")
    comm_backend_name: str = key("nccl", "which library communicates")


class ZeroOneAdamParams(AdamParams):
    """0/1 Adam."""

    var_freeze_step: int = key(100_000, "step after which the variance stays", ge=0)
    var_update_scaler: int = key(16, "steps between two updates of the variance", ge=1)
    local_step_scaler: int = key(32678, "steps after which the local steps double", ge=1)
    local_step_clipper: int = key(16, "most local steps", ge=1)
    cuda_aware: bool = key(False, "the MPI library reads device memory")
    comm_backend_name: str = key("nccl", "which library communicates")


class OneBitLambParams(LambParams):
    """1-bit LAMB."""

    freeze_step: int = key(100_000, "steps before the communication is compressed", ge=0)
    cuda_aware: bool = key(False, "the MPI library reads device memory")
    comm_backend_name: str = key("nccl", "which library communicates")
    coeff_beta: float = key(0.9, "decay of the trust ratio's running mean", ge=0, le=1)
    factor_max: float = key(4.0, "largest factor on the frozen trust ratio", gt=0)
    factor_min: float = key(0.5, "smallest factor on the frozen trust ratio", gt=0)
    factor_threshold: float = key(0.1, "largest change of that factor between steps", ge=0)


class WarmupLrParams(Section):
    """Warm up, then stay."""

    warmup_min_lr: float | tuple[float, ...] = key(0.0, "learning rate at the start (one, or one for each group)")
    warmup_max_lr: float | tuple[float, ...] | None = key(None, "learning rate after warm-up; null: the optimizer's")
    warmup_num_steps: int = key(1000, "steps of warm-up", ge=0)
    warmup_type: WarmupType = key("log", "how the rate grows")
    last_batch_iteration: int = key(-1, "the step to resume from; -1 is the start", ge=-1)


class WarmupDecayLrParams(WarmupLrParams):
    """Warm up, then fall to zero in a line."""

    warmup_max_lr: float | tuple[float, ...] | None = key(1e-3, "learning rate after warm-up; null: the optimizer's")
    total_num_steps: int | None = key(None, "steps of the whole run (required); 0: no training", ge=0)


class WarmupCosineLrParams(Section):
    """Warm up, then follow a cosine."""

    total_num_steps: int | None = key(None, "steps of the whole run (required); 0: no training", ge=0)
    warmup_min_ratio: float = key(0.0, "share of the learning rate at the start", ge=0)
    warmup_num_steps: int = key(1000, "steps of warm-up", ge=0)
    cos_min_ratio: float = key(1e-4, "share of the learning rate at the end", ge=0)
    warmup_type: WarmupType = key("log", "how the rate grows")
    last_batch_iteration: int = key(-1, "the step to resume from; -1 is the start", ge=-1)


class LrRangeTestParams(Section):
    """A learning rate that only grows, to find where training diverges."""

    lr_range_test_min_lr: float | tuple[float, ...] = key(1e-3, "learning rate at the start")
    lr_range_test_step_size: int = key(2000, "steps between two increases", ge=1)
    lr_range_test_step_rate: float = key(1.0, "growth in each interval", ge=0)
    lr_range_test_staircase: bool = key(False, "grow in stairs instead of steadily")
    last_batch_iteration: int = key(-1, "the step to resume from; -1 is the start", ge=-1)


class OneCycleParams(Section):
    """One rise and one fall of the learning rate, the momentum the other way round."""

    cycle_min_lr: float | None = key(None, "lowest learning rate of the cycle (required)")
    cycle_max_lr: float | None = key(None, "highest learning rate of the cycle (required)")
    decay_lr_rate: float = key(0.0, "decay of the learning rate after the cycle", ge=0)
    cycle_first_step_size: int = key(2000, "steps of the rise", ge=1)
    cycle_second_step_size: int | None = key(None, "steps of the fall; null: as many as the rise", ge=0)
    cycle_first_stair_count: int = key(0, "stairs of the rise; 0: steady", ge=0)
    cycle_second_stair_count: int | None = key(None, "stairs of the fall; null: as many as the rise's")
    decay_step_size: int = key(0, "steps between two decays after the cycle; 0: none", ge=0)
    cycle_momentum: bool = key(True, "cycle the momentum too")
    cycle_min_mom: float = key(0.8, "lowest momentum")
    cycle_max_mom: float = key(0.9, "highest momentum")
    decay_mom_rate: float = key(0.0, "decay of the momentum after the cycle")
    last_batch_iteration: int = key(-1, "the step to resume from; -1 is the start", ge=-1)


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OneBitLambParams,
}

SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLrParams,
    "WarmupDecayLR": WarmupDecayLrParams,
    "WarmupCosineLR": WarmupCosineLrParams,
    "LRRangeTest": LrRangeTestParams,
    "OneCycle": OneCycleParams,
}

# Arguments without a default.
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

# What "auto" means in the parameters: the constructor's own default, or the value of another key.
AUTO_IS_DEFAULT = {"betas", "eps", "weight_decay", "momentum", "warmup_min_lr", "adam_w_mode", "torch_adam"}


def canonical_type(name: str, known: Mapping[str, type[Section]]) -> str:
    """The canonical spelling of a type given in any case; the name itself where the schema does not have it.

    >>> canonical_type("onebitadam", OPTIMIZERS)
    'OneBitAdam'
    """
    folded = name.casefold().replace("_", "")
    folded = "adam" if folded == "deepspeedadam" else folded  # of the first versions with offload
    return next((kind for kind in known if kind.casefold() == folded), name)


def argument_problems(kind: str, params: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The argument, its problem and the repair, for values that the keys of a type allow and the type does not.

    Args:
        params: without those that are "auto".
    """
    if kind == "Lamb" and params.get("amsgrad"):
        yield "amsgrad", "true, which Lamb does not have.", "leave it out."
    if kind == "Muon" and params.get("adam_w_mode") is False:
        yield "adam_w_mode", "false, but the parameters that are not matrices always get AdamW.", "leave it out."
    if kind == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        yield "nesterov", "true, which needs a momentum and no dampening.", "set momentum, or leave nesterov out."
    if params.get("foreach") and params.get("fused"):
        yield "fused", "true, and so is foreach: torch takes one of them.", "leave one out."
