"""torch's Adam and AdamW on an accelerator, each range of main parameters by one kernel.

    torch's operators     cast the gradient, scale it, update, round to the parameters    48 bytes an element
    one kernel            all at once (``shoal.kernels.adam``)                            28, of fp32 gradients 30

Bytes are of bf16 gradients and parameters. Both start from the same state and round each operation to fp32; they differ
by those roundings, as torch's own implementations do from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.device import is_fake
from shoal.kernels.use import has_kernels, one_kernel
from shoal.optim.host_rules import kind_of

MIN_NUMEL = 1 << 20  # of a range: for a smaller one a launch takes the host longer than its update takes a GPU
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdamRange:
    """A range as the kernel takes it. All tensors are 1-D and of one length."""

    main: torch.nn.Parameter  # the optimizer's key of its state
    gradient: torch.Tensor  # not modified
    parameter: torch.Tensor | None  # gets the rounded main parameters; None: they are the parameters


def takes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], part: AdamRange) -> bool:
    """True if one kernel updates the range: the optimizer is torch's Adam or AdamW, its settings are numbers and
    none asks for another implementation, the range is fp32 and long, and Triton runs (or this is a dry run).
    """
    if part.main.numel() < MIN_NUMEL or kind_of(optimizer) not in ("Adam", "AdamW"):
        return False
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    tensors = [part.main, part.gradient] if part.parameter is None else [part.main, part.gradient, part.parameter]
    return (
        not any(isinstance(number, torch.Tensor) for number in numbers)
        and not any(group[key] for key in ("amsgrad", "foreach", "differentiable"))
        and part.main.dtype == torch.float32
        and part.gradient.dtype in _GRADIENTS
        and (is_fake(part.main) or has_kernels(*tensors))
    )


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parts: Sequence[AdamRange], gradient_scale: float
) -> None:
    """One step of ranges of one of the optimizer's groups, which ``takes`` has accepted.

    Does not block the host.
    """
    states = [_state_of(optimizer, group, part.main) for part in parts]
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    numbers = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    is_decoupled, is_corrected = bool(group["decoupled_weight_decay"]), bool(group.get("bias_correction", True))
    counts: Sequence[torch.Tensor] = steps
    if any(step.device != parts[0].main.device for step in steps):
        counts = torch.stack(steps).to(parts[0].main.device, non_blocking=True).unbind()
    scale = -gradient_scale if group["maximize"] else gradient_scale
    fused: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    for part, state, count in zip(parts, states, counts, strict=True):
        main, moments = part.main.detach(), (state["exp_avg"], state["exp_avg_sq"])
        if has_kernels(main):
            from shoal.kernels.adam import adam

            adam(
                main, moments, part.gradient, part.parameter, count, gradient_scale=scale, betas=(beta1, beta2),
                is_decoupled=is_decoupled, is_corrected=is_corrected, **numbers,
            )  # fmt: skip
            continue
        with one_kernel():
            gradient = part.gradient.float() * scale
            count = count if is_corrected else torch.full_like(count, math.inf)
            fused(
                [main], [gradient], *([moment] for moment in moments), [], [count],
                beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **numbers,
            )  # fmt: skip
            if part.parameter is not None:
                part.parameter.copy_(main)
            del gradient, count  # inside: a kernel writes what outlives it


def _state_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], main: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """The optimizer's state of a range, made as torch makes it: where Adam is not fused, the count is on the host."""
    state: dict[str, torch.Tensor] = optimizer.state[main]
    if not state:
        state["step"] = torch.zeros(
            (), dtype=torch.float32, device=main.device if group["fused"] or group["capturable"] else "cpu"
        )
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(main.detach()) for _ in range(2))
    return state
