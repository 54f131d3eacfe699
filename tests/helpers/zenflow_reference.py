"""ZenFlow's definition in plain torch: one process, masks over whole parameters, no kernel shared with the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Reference:
    """Trains fp32 ``parameters`` with AdamW.

    Args:
        ratio, interval, select_interval, warm_up: ZenFlow's settings; ``is_late``: ``overlap_step``.
    """

    parameters: Sequence[torch.Tensor]
    ratio: float
    interval: int
    select_interval: int | None = None
    warm_up: int = 0
    is_late: bool = False
    lr: float = 0.05
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    num_steps: int = 0
    num_own: int = 0  # updates of the important columns
    num_rest: int = 0  # updates of the others
    count: int = 0  # gradients in the sums
    chosen_at: int | None = None
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            names = ("main", "m", "v", "sum")
            state = {name: torch.zeros_like(parameter, dtype=torch.float64) for name in names}
            state["main"] = parameter.detach().double().clone()
            state["mask"] = torch.zeros(parameter.shape, dtype=torch.bool)
            self.states.append(state)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """One step. Sets the parameters."""
        number, self.num_steps = self.num_steps, self.num_steps + 1
        pairs = [(state, gradient.double()) for state, gradient in zip(self.states, gradients, strict=True)]
        if number < self.warm_up:
            self.num_own, self.num_rest = self.num_own + 1, self.num_rest + 1
            for state, gradient in pairs:
                self._adamw(state, gradient, torch.ones_like(state["mask"]), self.num_own)
            self._show()
            return
        if self.chosen_at is None or (self.select_interval and number - self.chosen_at >= self.select_interval):
            self._update_rest()
            self._show()
            for state, gradient in pairs:
                self._choose(state, gradient, is_first=self.chosen_at is None)
            self.chosen_at = number
        self.count += 1
        for state, gradient in pairs:
            state["sum"] += gradient
        if self.count == self.interval:
            if self.is_late:
                self._show()  # what the last update of the others gave
            self._update_rest()
            if not self.is_late:
                self._show()
        self.num_own += 1
        for (state, gradient), parameter in zip(pairs, self.parameters, strict=True):
            self._adamw(state, gradient, state["mask"], self.num_own)
            parameter.copy_(torch.where(state["mask"], state["main"].to(parameter.dtype), parameter))

    def _update_rest(self) -> None:
        if self.count:
            self.num_rest += 1
            for state in self.states:
                self._adamw(state, state["sum"] / self.count, ~state["mask"], self.num_rest)
                state["sum"].zero_()
            self.count = 0

    def _choose(self, state: dict[str, torch.Tensor], gradient: torch.Tensor, *, is_first: bool) -> None:
        was = state["mask"]
        if gradient.dim() == 1:
            state["mask"] = torch.ones_like(was)
        else:
            norms = gradient.flatten(1).abs().sum(0)
            columns = torch.zeros(norms.shape, dtype=torch.bool)
            columns[sorted(range(len(norms)), key=lambda i: -norms[i])[: max(1, int(self.ratio * len(norms)))]] = True
            state["mask"] = columns.view(1, *gradient.shape[1:]).expand_as(gradient).clone()
        if is_first:
            return
        for name, beta in zip(("m", "v"), self.betas, strict=True):
            own, rest = 1 - beta**self.num_own, 1 - beta**self.num_rest
            state[name][state["mask"] & ~was] *= own / rest
            state[name][~state["mask"] & was] *= rest / own

    def _adamw(self, state: dict[str, torch.Tensor], gradient: torch.Tensor, mask: torch.Tensor, number: int) -> None:
        beta1, beta2 = self.betas
        m = beta1 * state["m"] + (1 - beta1) * gradient
        v = beta2 * state["v"] + (1 - beta2) * gradient**2
        update = (m / (1 - beta1**number)) / ((v / (1 - beta2**number)).sqrt() + self.eps)
        main = state["main"] * (1 - self.lr * self.weight_decay) - self.lr * update
        for name, new in (("m", m), ("v", v), ("main", main)):
            state[name] = torch.where(mask, new, state[name])

    def _show(self) -> None:
        for state, parameter in zip(self.states, self.parameters, strict=True):
            parameter.copy_(state["main"])

    def moments(self) -> Iterator[torch.Tensor]:
        for state in self.states:
            yield from (state["m"], state["v"])
