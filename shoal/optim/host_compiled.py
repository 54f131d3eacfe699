"""The host's step as one compiled loop, where this machine has a compiler and the loop gives torch's bits.

Each rule is written as one expression with the roundings of torch's kernels: ``fma`` where they round once, and no
other contraction. It is compiled by ``torch.compile``, then tried beside torch's kernel on a small range that holds
special values; a loop that differs is not used. The elements past the last multiple of ``CUT_NUMEL`` go through torch's
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shoal.optim.host_blocks import BlockedUpdate
from shoal.optim.host_rules import CUT_NUMEL, Kind, Rule

TRIAL_NUMEL = 64 * CUT_NUMEL

Loop = Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor | None], None]
"""``loop(numbers, master, states, gradient, parameter)``, in place; ``numbers`` is fp32, 1-D."""


@dataclass(frozen=True)
class Shape:
    """All that a loop is compiled for."""

    kind: Kind
    gradient: torch.dtype
    parameter: torch.dtype | None
    num_threads: int
    has_decay: bool
    has_momentum: bool
    is_first: bool  # of SGD
    lerps_up: bool  # of Adam: is 1 - beta1 below a half?
    amsgrad: bool
    nesterov: bool
    maximize: bool

    @classmethod
    def of(cls, rule: Rule, gradient: torch.dtype, parameter: torch.dtype | None, num_threads: int) -> Shape:
        return cls(
            kind=rule.kind,
            gradient=gradient,
            parameter=parameter,
            num_threads=num_threads,
            has_decay=rule.weight_decay != 0,
            has_momentum=rule.momentum != 0,
            is_first=rule.kind == "SGD" and rule.is_first,
            lerps_up=1 - rule.beta1 < 0.5,
            amsgrad=rule.amsgrad,
            nesterov=rule.nesterov,
            maximize=rule.maximize,
        )


def numbers_of(rule: Rule, coefficient: float) -> torch.Tensor:
    """What the loop multiplies by. Computed in fp64 and rounded once, as the kernels do. fp32."""
    found = [coefficient]
    if rule.kind in ("Adam", "AdamW"):
        decay = 1 - rule.lr * rule.weight_decay if rule.kind == "AdamW" else rule.weight_decay
        rate = rule.lr / (1 - rule.beta1**rule.step)
        correction = math.sqrt(1 - rule.beta2**rule.step)
        found += [decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rate, correction, rule.eps]
    elif rule.kind == "Adagrad":
        found += [rule.weight_decay, rule.lr / (1 + (rule.step - 1) * rule.lr_decay), rule.eps]
    elif rule.kind == "SGD":
        found += [rule.weight_decay, rule.momentum, 1 - rule.dampening, -rule.lr]
    else:
        found += [rule.weight_decay, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.lr]
    return torch.tensor(found, dtype=torch.float32)


def expression(shape: Shape) -> Loop:
    """The rule as one expression, to be compiled."""
    from torch._inductor.inductor_prims import fma

    def adam(
        n: Sequence[torch.Tensor], master: torch.Tensor, states: list[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _, decay, weight, beta2, rest2, rate, correction, eps = n
        if shape.kind == "AdamW":
            master = master * decay if shape.has_decay else master
        elif shape.has_decay:
            gradient = fma(master, decay.expand_as(master), gradient)
        difference = gradient - states[0]
        if shape.lerps_up:
            first = fma(weight.expand_as(master), difference, states[0])
        else:
            first = fma((weight - 1).expand_as(master), difference, gradient)
        second = fma(rest2 * gradient, gradient, states[1] * beta2)
        largest = torch.maximum(states[2], second) if shape.amsgrad else second
        denominator = largest.sqrt() / correction + eps
        return master - rate * first / denominator, [first, second, largest] if shape.amsgrad else [first, second]

    def adagrad(
        n: Sequence[torch.Tensor], master: torch.Tensor, states: list[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _, decay, rate, eps = n
        if shape.has_decay:
            gradient = fma(master, decay.expand_as(master), gradient)
        total = fma(gradient, gradient, states[0])
        return master - rate * gradient / (total.sqrt() + eps), [total]

    def sgd(
        n: Sequence[torch.Tensor], master: torch.Tensor, states: list[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _, decay, momentum, rest, rate = n
        if shape.has_decay:
            gradient = fma(master, decay.expand_as(master), gradient)
        if not shape.has_momentum:
            return fma(gradient, rate.expand_as(master), master), []
        held = gradient if shape.is_first else fma(gradient, rest.expand_as(master), states[0] * momentum)
        gradient = fma(held, momentum.expand_as(master), gradient) if shape.nesterov else held
        return fma(gradient, rate.expand_as(master), master), [held]

    def lion(
        n: Sequence[torch.Tensor], master: torch.Tensor, states: list[torch.Tensor], gradient: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _, decay, beta1, rest1, beta2, rest2, rate = n
        direction = torch.sign(fma(gradient, rest1.expand_as(master), states[0] * beta1))
        if shape.has_decay:
            direction = fma(master, decay.expand_as(master), direction)
        held = fma(gradient, rest2.expand_as(master), states[0] * beta2)
        return master - direction * rate, [held]

    rules: dict[Kind, Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]]
    rules = {"Adam": adam, "AdamW": adam, "Adagrad": adagrad, "SGD": sgd, "Lion": lion}
    rule = rules[shape.kind]

    def loop(
        numbers: torch.Tensor,
        master: torch.Tensor,
        states: list[torch.Tensor],
        gradient: torch.Tensor,
        parameter: torch.Tensor | None,
    ) -> None:
        n = numbers.unbind()
        scaled = gradient.float() * n[0]
        updated, held = rule(n, master, states, -scaled if shape.maximize else scaled)
        for state, value in zip(states, held, strict=True):
            state.copy_(value)
        master.copy_(updated)
        if parameter is not None:
            parameter.copy_(updated)

    # torch.compile counts what it has compiled per code object, and stops at eight.
    loop.__code__ = loop.__code__.replace(co_name=f"{shape.kind.lower()}_loop")
    return loop


@cache
def compiled_loop(shape: Shape) -> Loop | str:
    """The loop, compiled and tried; or why there is none. Once per process, in seconds to minutes."""
    try:
        options: dict[str, Any] = {
            "cpp.enable_floating_point_contract_flag": "off",
            "cpp.threads": shape.num_threads,
        }
        loop: Loop = torch.compile(expression(shape), dynamic=True, fullgraph=True, options=options)
        difference = _first_difference(loop, shape)
    except Exception as problem:  # a compiler can fail in any way, and a step must not fail with it
        return f"{type(problem).__name__}: {(str(problem).strip() or 'no reason given').splitlines()[0]}"
    return loop if difference is None else difference


def run(
    loop: Loop,
    rule: Rule,
    master: torch.Tensor,
    states: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    parameter: torch.Tensor | None,
    *,
    coefficient: float,
) -> bool:
    """One update of one range. Arguments as of ``BlockedUpdate``.

    Returns: was it done? Not where torch.compile needs another loop for these tensors, and cannot make it.
    """
    end = master.numel() // CUT_NUMEL * CUT_NUMEL
    with torch.no_grad():
        if end:
            cut = None if parameter is None else parameter[:end]
            numbers = numbers_of(rule, coefficient)
            try:
                loop(numbers, master[:end], [state[:end] for state in states], gradient[:end], cut)
            except torch._dynamo.exc.TorchDynamoException:  # from before anything ran
                return False
    if end < master.numel():
        rest = None if parameter is None else parameter[end:]
        tail = BlockedUpdate(
            rule,
            master[end:],
            [state[end:] for state in states],
            gradient[end:],
            rest,
            coefficient=coefficient,
            block_numel=CUT_NUMEL,
        )
        tail.run(torch.empty(CUT_NUMEL), torch.empty(CUT_NUMEL) if rule.needs_room else None)
    return True


def _first_difference(loop: Loop, shape: Shape) -> str | None:
    """Two steps of the loop beside torch's kernel, or None: every bit is equal."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-12, 3, TRIAL_NUMEL)
    master = torch.randn(TRIAL_NUMEL, generator=random)
    gradient = torch.randn(TRIAL_NUMEL, generator=random) * sizes
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-42, 1e38, -3e38, math.inf, -math.inf, math.nan])
    gradient[: special.numel()] = special
    master[special.numel() : 2 * special.numel()] = special
    gradient = gradient.to(shape.gradient)
    steps = (1.0,) if shape.is_first else (2.0, 30.0)
    ranges = []
    for is_loop in (False, True):
        held = master.clone()
        names = _trial_rule(shape, steps[0]).state_names
        states = [torch.zeros(TRIAL_NUMEL) for _ in names]
        parameter = None if shape.parameter is None else torch.zeros(TRIAL_NUMEL, dtype=shape.parameter)
        for step in steps:
            rule = _trial_rule(shape, step)
            if is_loop:
                if not run(loop, rule, held, states, gradient, parameter, coefficient=0.7):
                    return "torch.compile could not make it"
            else:
                update = BlockedUpdate(
                    rule, held, states, gradient, parameter, coefficient=0.7, block_numel=TRIAL_NUMEL
                )
                update.run(torch.empty(TRIAL_NUMEL), torch.empty(TRIAL_NUMEL))
        ranges.append([held, *states] + ([] if parameter is None else [parameter.float()]))
    names = ("master", *names, "parameter")
    for name, expected, found in zip(names, *ranges, strict=False):
        is_equal = (expected == found) | (expected.isnan() & found.isnan())
        if not is_equal.all():
            place = int((~is_equal).nonzero()[0])
            return (
                f"its {name} differs from torch's kernel in {int((~is_equal).sum())} of {TRIAL_NUMEL} elements, "
                f"as {float(found[place])!r} from {float(expected[place])!r}"
            )
    return None


def _trial_rule(shape: Shape, step: float) -> Rule:
    return Rule(
        kind=shape.kind,
        step=step,
        lr=3e-3,
        beta1=0.9 if shape.lerps_up else 0.4,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1 if shape.has_decay else 0.0,
        momentum=0.9 if shape.has_momentum else 0.0,
        dampening=0.0 if shape.nesterov else 0.1,
        lr_decay=0.01,
        amsgrad=shape.amsgrad,
        nesterov=shape.nesterov,
        maximize=shape.maximize,
    )
