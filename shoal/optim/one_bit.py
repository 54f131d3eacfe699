"""1-bit Adam and 0/1 Adam: AdamW whose ranks, after a warm-up, exchange signs of the momentum in place of gradients.

    OneBitAdam   steps 1 to freeze_step        AdamW; gradients are summed as they are
                 later                         m = mean C(b1 m + (1 - b1) g),  v stays
    ZeroOneAdam  steps 1 to var_freeze_step    every n-th: AdamW, gradients are summed as they are; n grows
                                               others: m = b1 m + (1 - b1) mean C(g),  v stays
                 later                         each rank: m = b1 m + (1 - b1) g,  u += lr m,  w = main - u / sqrt(v);
                                               every n-th: u = mean C(u),  m = u / sum lr,  main -= u / sqrt(v),  u = 0

``g``: this rank's own gradient. ``C``: 1 bit for each element and a scale for each block, with error feedback
(``SentGradient``). Steps are those that were applied, counted from 1. The bias of v is corrected by the number of its
updates.

Elements whose v is 0 have had no gradient yet: their momentum stays 0 while v stays. Their sign is noise, which a
denominator of 0 would make a large update. (DeepSpeed asks for an ``exp_avg_mask`` instead.)

Sources: 1-bit Adam, algorithm 1 (arXiv:2102.02888). 0/1 Adam, algorithms 1 and 2 (arXiv:2202.06009). Unlike there, a
block of the encoding is small, weight decay is decoupled, and u is not mixed with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.optim.options import check_options
from shoal.optim.sums_values import OwnValues, Sums, SumsValues
from shoal.optim.variants import AdamWithBias


class OneBitAdam(SumsValues, AdamWithBias):
    """1-bit Adam.

    Args:
        freeze_step: steps with gradients that are not encoded, at least 1; then v stays.
        bias_correction: as Adam's.
        fused: of the warm-up's steps, as torch's AdamW.

    Memory: as AdamW; in an engine later 4 bytes of errors for each element, and a part of them again.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        _check("OneBitAdam", lr, betas, eps, freeze_step=freeze_step)
        super().__init__(
            params,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            decoupled_weight_decay=True,
            fused=fused,
        )
        self.freeze_step = freeze_step

    def sums(self) -> Sums:
        return "gradients" if self.num_steps < self.freeze_step else "values"

    def to_sum(self, ranges: Sequence[OwnValues]) -> None:
        for each in ranges:
            beta1, _ = each.group["betas"]
            state = _state_of(self.state[each.param], each.param, each.group)
            each.values.mul_(1 - beta1).add_(state["exp_avg"], alpha=beta1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.sums() == "gradients":
            # Not the decorated function, whose hooks already run around this one. (For mypy a method has no __func__.)
            return inspect.unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_frozen(param, group)
        return None

    def _step_frozen(self, param: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """The gradient is the new momentum."""
        state = _state_of(self.state[param], param, group)
        state.setdefault("var_step", state["step"].clone())
        state["step"] += 1
        assert param.grad is not None
        torch.mul(param.grad, state["exp_avg_sq"] > 0, out=state["exp_avg"])
        _descend(param, state, group)


class ZeroOneAdam(SumsValues, torch.optim.Optimizer):
    """0/1 Adam.

    Args:
        var_freeze_step: the last step in which v may be updated.
        var_update_scaler: updates of v after which the interval between them doubles, from 1 on.
        local_step_scaler: steps after which the interval between sums doubles, once v stays.
        local_step_clipper: the largest such interval.
        bias_correction: as Adam's.

    Memory: as AdamW, and u: 4 bytes for each element, once v stays.
    """

    has_local_steps = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
    ) -> None:
        counts = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        _check("ZeroOneAdam", lr, betas, eps, **counts)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper

    @property
    def _is_frozen(self) -> bool:
        return self.num_steps >= self.var_freeze_step

    def sums(self) -> Sums:
        step = self.num_steps + 1
        if not self._is_frozen:
            return "values" if step % variance_interval(step, self.var_update_scaler) else "gradients"
        doublings = min((self.num_steps - self.var_freeze_step) // self.local_step_scaler, 62)
        return "nothing" if step % min(1 << doublings, self.local_step_clipper) else "values"

    def drops_errors(self) -> bool:
        return self.num_steps == self.var_freeze_step

    def to_sum(self, ranges: Sequence[OwnValues]) -> None:
        for each in ranges if self._is_frozen else ():
            self._advance(each.param, each.group, each.values)
            each.values.copy_(self.state[each.param]["momentum_accumulator"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        sums = self.sums()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self._is_frozen:
                    self._step_adam(param, group, updates_variance=sums == "gradients")
                elif sums == "values":
                    self.settle(param, group, param.grad)
                else:
                    self._advance(param, group, param.grad)
        return None

    def _step_adam(self, param: torch.nn.Parameter, group: dict[str, Any], *, updates_variance: bool) -> None:
        state, gradient, (beta1, beta2) = _state_of(self.state[param], param, group), param.grad, group["betas"]
        assert gradient is not None
        state.setdefault("var_step", torch.zeros_like(state["step"]))
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        if updates_variance:
            state["var_step"] += 1
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].mul_(state["exp_avg_sq"] > 0)
        _descend(param, state, group)

    def _advance(self, param: torch.nn.Parameter, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """A step of this rank alone. Main parameters get the part of the update that all ranks share."""
        state, (beta1, _) = _state_of(self.state[param], param, group), group["betas"]
        state.setdefault("var_step", state["step"].clone())
        if "momentum_accumulator" not in state:
            state["momentum_accumulator"] = torch.zeros_like(param.detach())
            state["lrs"] = torch.zeros((), dtype=torch.float64, device=state["step"].device)
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1).mul_(state["exp_avg_sq"] > 0)
        kept, rate = 1 - group["lr"] * group["weight_decay"], _rate(state, group)
        state["lrs"].mul_(kept).add_(rate)
        state["momentum_accumulator"].mul_(kept).add_(state["exp_avg"] * rate)
        param.mul_(kept)

    def offset(self, param: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor | None:
        state = self.state.get(param, {})
        own = state.get("momentum_accumulator")
        return None if own is None else own / _denominator(state, group)

    def pending(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        state = self.state.get(param, {})
        return state["momentum_accumulator"] if float(state.get("lrs", 0.0)) > 0 else None

    def settle(self, param: torch.nn.Parameter, group: dict[str, Any], mean: torch.Tensor) -> None:
        state = self.state[param]
        mean = mean * (state["exp_avg_sq"] > 0)
        torch.div(mean, state["lrs"], out=state["exp_avg"])
        param.sub_(mean.div_(_denominator(state, group)))
        del state["momentum_accumulator"], state["lrs"]


def variance_interval(step: int, scaler: int) -> int:
    """Steps between two updates of v, at a step: it doubles after ``scaler`` updates.

    >>> [step for step in range(1, 25) if step % variance_interval(step, 3) == 0]
    [1, 2, 3, 4, 6, 8, 12, 16, 20, 24]
    """
    interval, last = 1, scaler
    while step > last:
        interval *= 2
        last = (last // interval + scaler) * interval
    return interval


def _check(name: str, lr: float | torch.Tensor, betas: tuple[float, float], eps: float, **counts: int) -> None:
    """Raises: OptimizerError: a number outside its range; a number of steps is at least 1."""
    others = {f"{key} is {value}, expected at least 1": value < 1 for key, value in counts.items()}
    check_options(name, not_negative={"lr": lr, "eps": eps}, betas=(betas[0], betas[1]), others=others)


def _state_of(state: dict[str, Any], param: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if group.get("fused") else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param.detach()) for _ in range(2))
    return state


def _descend(param: torch.nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    param.mul_(1 - group["lr"] * group["weight_decay"])
    param.sub_((state["exp_avg"] / _denominator(state, group)).mul_(_rate(state, group)))


def _denominator(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    """``sqrt(v) + eps``, v corrected for its start at zero."""
    square: torch.Tensor = state["exp_avg_sq"]
    if group["bias_correction"]:
        square = square / (1 - group["betas"][1] ** state["var_step"].double().clamp(min=1))
    return square.sqrt().add_(group["eps"])


def _rate(state: dict[str, Any], group: dict[str, Any]) -> Any:
    """What the momentum is multiplied by."""
    return group["lr"] / (1 - group["betas"][0] ** state["step"].double()) if group["bias_correction"] else group["lr"]
