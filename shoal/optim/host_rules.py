"""The update rules of the CPU optimizer, and torch's kernel for each.

    kind      state, one element per element       kernel, with ``fused=True``
    Adam      exp_avg, exp_avg_sq                  torch._fused_adam_
    AdamW     exp_avg, exp_avg_sq                  torch._fused_adamw_
    Adagrad   sum                                  torch._fused_adagrad_
    SGD       momentum_buffer (with momentum)      torch._fused_sgd_
    Lion      exp_avg                              the operations of shoal.optim.lion.Lion

With ``amsgrad`` Adam and AdamW have ``max_exp_avg_sq`` too. Without ``fused=True`` torch's optimizers round otherwise;
their kernel is then the functional form that their ``step()`` calls (``torch.optim.adam.adam``). So a range updated
here has the bits that the optimizer's ``step()`` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from shoal.errors import OptimizerError
from shoal.optim.elementwise import is_known
from shoal.optim.lion import Lion
from shoal.optim.variants import AdamWithBias, FP32States
from shoal.optim.whole import WholeTensorOptimizer

RuleName = Literal["Adam", "AdamW", "Adagrad", "Lion", "SGD"]
KINDS: tuple[RuleName, ...] = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")

# A vectorised kernel computes the last few elements (fewer than one vector) one by one and may round them otherwise.
# Blocks that are multiples of this many elements have no such elements, but for the last block of a range.
CUT_NUMEL = 64

Kernel = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None], None]
"""``kernel(main, gradient, states, scratch)``: update in place. All fp32, 1-D, of one length; ``scratch`` where
``Rule.needs_scratch``. The gradient is not modified."""


@dataclass(frozen=True)
class Rule:
    """One step's rule and its hyperparameters as Python floats."""

    kind: RuleName
    step: float  # of this step, from 1
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    lr_decay: float = 0.0
    amsgrad: bool = False
    nesterov: bool = False
    maximize: bool = False
    fused: bool = True
    foreach: bool = False  # of an optimizer that is not fused

    @classmethod
    def of(cls, kind: RuleName, hyper: Mapping[str, Any], step: float) -> Rule:
        """The rule for a parameter group of the optimizer.

        Raises: OptimizerError: not one of ``KINDS``, or the group lacks a hyperparameter.
        """
        if kind not in KINDS:
            raise OptimizerError(
                f"the CPU optimizer has no rule {kind!r}.",
                do=f"use one of {', '.join(KINDS)}, or leave the step to the optimizer.",
                code="host-step-rule",
            )
        try:
            numbers: dict[str, Any] = {key: float(hyper[key]) for key in NUMBERS[kind]}
            if kind in ("Adam", "AdamW", "Lion"):
                numbers["beta1"], numbers["beta2"] = (float(beta) for beta in hyper["betas"])
        except KeyError as problem:
            raise OptimizerError(
                f"the hyperparameters of {kind} have no {problem.args[0]!r}.",
                do="pass the optimizer's parameter group.",
                code="host-step-rule",
            ) from problem
        flags = {key: bool(hyper.get(key, False)) for key in FLAGS[kind]}
        if kind != "Lion":
            flags |= {"fused": bool(hyper.get("fused", True)), "foreach": bool(hyper.get("foreach", False))}
        if not hyper.get("bias_correction", True):
            step = math.inf  # nothing is left to correct
        return cls(kind=kind, step=float(step), **numbers, **flags)

    @property
    def state_names(self) -> tuple[str, ...]:
        if self.kind in ("Adam", "AdamW"):
            return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")
        if self.kind == "SGD":
            return ("momentum_buffer",) if self.momentum else ()
        return ("sum",) if self.kind == "Adagrad" else ("exp_avg",)

    @property
    def needs_scratch(self) -> bool:
        """True if the kernel needs a second scratch tensor."""
        return self.kind == "Lion"

    @property
    def is_first(self) -> bool:
        return self.step <= 1

    def kernel(self, device: torch.device | None = None) -> Kernel:
        """torch's kernel with this step's hyperparameters; without ``fused`` what ``step()`` of its optimizer calls.

        Args:
            device: of the tensors; None: the host's.
        """
        if self.kind == "Lion":
            return partial(_lion, self)
        betas = ("beta1", "beta2") if self.kind in ("Adam", "AdamW") else ()
        names = {*NUMBERS[self.kind], *FLAGS[self.kind], *betas}
        settings: dict[str, Any] = {name: value for name, value in vars(self).items() if name in names}
        call: Callable[..., Any]
        if self.fused:
            call = _FUSED[self.kind]
            settings |= {"grad_scale": None, "found_inf": None}
            settings |= {"is_first_step": self.is_first} if self.kind == "SGD" else {}
        else:
            call = _UNFUSED[self.kind]
            settings |= {"foreach": self.foreach, "fused": False}
            settings |= {"decoupled_weight_decay": self.kind == "AdamW"} if call is adam else {}
        # A fused kernel reads the count on its device; the other functions read it on the host.
        count = torch.full(
            (), self.step if self.fused else self.step - 1, dtype=torch.float32, device=device if self.fused else "cpu"
        )
        return partial(self._run, call, settings, count)

    def _run(
        self,
        call: Callable[..., Any],
        settings: dict[str, Any],
        count: torch.Tensor,
        main: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        scratch: torch.Tensor | None,
    ) -> None:
        if not self.fused:
            count = count.clone()  # the function counts this step
        match self.kind:
            case "SGD":
                lists: list[list[Any]] = [list(states) or ([] if self.fused else [None])]
            case "Adagrad":
                lists = [[states[0]], [count]]
            case _:
                lists = [[states[0]], [states[1]], list(states[2:]), [count]]
        call([main], [gradient], *lists, **settings)


_FUSED: dict[RuleName, Callable[..., Any]] = {
    "Adam": torch._fused_adam_,
    "AdamW": torch._fused_adamw_,
    "Adagrad": torch._fused_adagrad_,
    "SGD": torch._fused_sgd_,
}
_UNFUSED: dict[RuleName, Callable[..., Any]] = {"Adam": adam, "AdamW": adam, "Adagrad": adagrad, "SGD": sgd}

# The hyperparameters of each kind, in addition to the betas.
NUMBERS: dict[RuleName, tuple[str, ...]] = {
    "Adam": ("lr", "eps", "weight_decay"),
    "AdamW": ("lr", "eps", "weight_decay"),
    "Adagrad": ("lr", "eps", "weight_decay", "lr_decay"),
    "Lion": ("lr", "weight_decay"),
    "SGD": ("lr", "weight_decay", "momentum", "dampening"),
}
FLAGS: dict[RuleName, tuple[str, ...]] = {
    "Adam": ("amsgrad", "maximize"),
    "AdamW": ("amsgrad", "maximize"),
    "Adagrad": ("maximize",),
    "Lion": (),
    "SGD": ("nesterov", "maximize"),
}


def _lion(
    rule: Rule,
    main: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    scratch: torch.Tensor | None,
) -> None:
    """The operations of ``shoal.optim.lion``, in its order, without its allocation."""
    average = states[0]
    direction = torch.mul(average, rule.beta1, out=scratch)
    direction.add_(gradient, alpha=1 - rule.beta1).sign_()
    if rule.weight_decay:
        direction.add_(main, alpha=rule.weight_decay)
    direction.mul_(rule.lr)
    main.sub_(direction)
    average.mul_(rule.beta2).add_(gradient, alpha=1 - rule.beta2)


def kind_of(optimizer: torch.optim.Optimizer) -> RuleName | None:
    """The rule that gives this optimizer's bits; None: its own ``step()`` must run.

    A class derived from one of these has none if it changes the update, as ``FP32States`` may.
    """
    kinds: dict[type, RuleName] = {
        Lion: "Lion",
        torch.optim.Adam: "Adam",
        torch.optim.AdamW: "AdamW",
        AdamWithBias: "Adam",
        torch.optim.Adagrad: "Adagrad",
        torch.optim.SGD: "SGD",
    }
    base = next((base for base in type(optimizer).__mro__ if base in kinds), None)
    if base is None or not is_known(type(optimizer)) or (isinstance(optimizer, FP32States) and optimizer.may_cast):
        return None
    kind = kinds[base]
    if kind != "Lion" and not all(group.get("fused") or _is_plain(group) for group in optimizer.param_groups):
        return None
    if kind in ("Adam", "AdamW"):
        decoupled = {bool(group.get("decoupled_weight_decay", kind == "AdamW")) for group in optimizer.param_groups}
        return None if len(decoupled) > 1 else ("AdamW" if decoupled.pop() else "Adam")
    return kind


def _is_plain(group: Mapping[str, Any]) -> bool:
    """True if the hyperparameters of a group without ``fused`` are Python numbers. Tensors round differently."""
    numbers = (group["lr"], *group.get("betas", ()))
    is_graph = bool(group.get("capturable") or group.get("differentiable"))
    return not is_graph and not any(isinstance(number, torch.Tensor) for number in numbers)


def host_note(optimizer: torch.optim.Optimizer) -> str | None:
    """The line logged at start where optimizer state is in host memory and its update is not a fused kernel."""
    name = type(optimizer).__name__
    kind = kind_of(optimizer)
    if kind is None:
        own = (
            f"{name}'s matrices are orthogonalized on the device, and the rest of its update runs on the host"
            if isinstance(optimizer, WholeTensorOptimizer) and optimizer.moves_to_device
            else f"{name}.step() runs unchanged on the host"
        )
        return (
            f"offload_optimizer: {own}; the step waits for it. The updates of {', '.join(KINDS)} run in threads "
            "while the device works."
        )
    if kind != "Lion" and not all(group.get("fused") for group in optimizer.param_groups):
        return (
            f"offload_optimizer: {name} was built without fused=True, so the CPU optimizer uses torch's unfused "
            "operations, which give the bits of its step(); fused=True takes about half the time."
        )
    return None
