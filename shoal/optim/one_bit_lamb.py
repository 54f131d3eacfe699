"""1-bit LAMB: LAMB whose ranks, after a warm-up, exchange signs of scaled momenta in place of gradients.

    steps 1 to freeze_step    LAMB; c = coeff_beta c + (1 - coeff_beta) r, where its trust ratio r is not 1
    later                     m' = mean C(s (b1 m + (1 - b1) g)) / s
                              fresh = b2 fresh + (1 - b2) ((m' - b1 m) / (1 - b1))^2,  v stays
                              u = m' / (sqrt(v) + eps) + weight_decay w
                              f = max((sqrt(v) + eps) / (sqrt(fresh) + eps)), within its bounds
                              w = w - lr c f u, with the bias corrections of ``Lamb``

Of each parameter ``s`` is the mean over all parameters of the root of the mean square of m at the end of the warm-up,
divided by the parameter's own. Elements whose v is 0 keep a momentum of 0, as in ``one_bit``.

Source: 1-bit LAMB, algorithm 1 (arXiv:2104.06069); the bounds of f, DeepSpeed's OnebitLamb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from shoal.comm.protocol import Communicator
from shoal.device import numbers_on
from shoal.errors import OptimizerError
from shoal.optim.lamb import Lamb, Pieces, descend, roots, trust_ratios, whole_parts
from shoal.optim.sums_values import OwnValues, Sums, SumsValues
from shoal.optim.whole import Loads, RangeViews

_FRESH = "exp_avg_sq_fresh"


class OneBitLamb(SumsValues, Lamb):
    """1-bit LAMB.

    Args:
        freeze_step: steps with gradients that are not encoded, at least 1; then v stays.
        coeff_beta: of the running mean of the trust ratio; 1 / (1 - coeff_beta) should be below ``freeze_step``.
        factor_max, factor_min: bounds of f; ``factor_threshold``: its largest relative change between two steps.
        others: as ``Lamb``.

    Raises: OptimizerError: a number outside its range.
    Memory: as LAMB, and 4 bytes for each element, once v stays.
    """

    by_parameter: ClassVar[Mapping[str, float]] = {"lamb_coeff_freeze": 0.0, "last_factor": 1.0, "scaling_coeff": 1.0}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: int = 100_000,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        wrong = [f"freeze_step is {freeze_step}, expected at least 1"] if freeze_step < 1 else []
        if not 0 < factor_min <= factor_max:
            wrong.append(
                f"factor_min is {factor_min} and factor_max {factor_max}, expected 0 < factor_min <= factor_max"
            )
        if wrong:
            raise OptimizerError("; ".join(wrong) + ".", where="OneBitLamb", code="optimizer-params")
        adam = lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay
        super().__init__(params, *adam, max_coeff, min_coeff)
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factors = factor_min, factor_max, factor_threshold

    def sums(self) -> Sums:
        return "gradients" if self.num_steps < self.freeze_step else "values"

    def to_sum(self, ranges: Sequence[OwnValues]) -> None:
        states = [self._state_of(each.param, each.group) for each in ranges]
        new = [(each, state) for each, state in zip(ranges, states, strict=True) if _FRESH not in state]
        if new:
            self._freeze(new)
        for each, state in zip(ranges, states, strict=True):
            beta1, _ = each.group["betas"]
            each.values.mul_(1 - beta1).add_(state["exp_avg"], alpha=beta1)
            for part in each.parts:
                each.values[part.start : part.stop].mul_(state["scaling_coeff"][0, part.parameter])

    def _freeze(self, ranges: Sequence[tuple[OwnValues, dict[str, torch.Tensor]]]) -> None:
        """The warm-up has ended: v stays, and the scales follow from the momenta."""
        sizes = []
        for each, state in ranges:
            state[_FRESH] = state["exp_avg_sq"].clone()
            sizes += [state["exp_avg"][part.start : part.stop].square().mean().sqrt() for part in each.parts]
        mean, at = torch.stack(sizes).mean(), 0
        for each, state in ranges:
            scales = self._numbers(state, "scaling_coeff", each.num_parameters)
            for part in each.parts:
                scales[part.parameter] = torch.where(sizes[at] > 0, mean / sizes[at], 1.0)
                at += 1

    def _numbers(self, state: dict[str, torch.Tensor], key: str, count: int) -> torch.Tensor:
        """State of one number for each parameter. Shape: [parameters]."""
        if key not in state:
            state[key] = torch.full(
                (1, count), self.by_parameter[key], dtype=torch.float32, device=state["exp_avg"].device
            )
        return state[key][0]

    def _update(
        self, flats: Sequence[RangeViews], comm: Communicator | None, tp: Communicator | None, loads: Loads
    ) -> Iterator[None]:
        yield from ()  # nothing is sent
        assert comm is None and tp is None, "every rank holds whole parameters"
        if self.sums() == "values":
            self._step_frozen(flats)
            return
        pieces, squares = self._squares_alone(flats)
        ratios = trust_ratios(flats, squares)
        for flat, own in zip(flats, ratios.split([len(flat.shapes) for flat in flats]), strict=True):
            means = self._numbers(flat.state, "lamb_coeff_freeze", len(flat.shapes))
            means.copy_(torch.where(own != 1, torch.lerp(own, means, self.coeff_beta), means))
        descend(flats, pieces, ratios)

    def _step_frozen(self, flats: Sequence[RangeViews]) -> None:
        counts = [len(flat.shapes) for flat in flats]
        coefficients, last, scales = (
            torch.cat([self._numbers(flat.state, key, count) for flat, count in zip(flats, counts, strict=True)])
            for key in ("lamb_coeff_freeze", "last_factor", "scaling_coeff")
        )
        batches = whole_parts(flats)
        for pieces in batches:
            at = numbers_on(last.device, pieces.numbers)
            ratios = self._ratios(pieces, scales.index_select(0, at))
            before, (_, _, change) = last.index_select(0, at), self.factors
            last.index_copy_(0, at, torch.maximum(torch.minimum(ratios, before * (1 + change)), before * (1 - change)))
        for flat, own in zip(flats, last.split(counts), strict=True):
            self._numbers(flat.state, "last_factor", len(flat.shapes)).copy_(own)
        descend(flats, batches, coefficients * last, last_square=self.freeze_step)

    def _ratios(self, pieces: Pieces, scales: torch.Tensor) -> torch.Tensor:
        """Take the sum of the momenta, times ``scales``, as the momenta, and return f within its bounds. [pieces]."""
        group, momenta, squares = pieces.group, pieces.averages, pieces.squares
        beta1, beta2 = group["betas"]
        fresh = pieces.of_state(_FRESH)
        new = [total / scale for total, scale in zip(pieces.gradients, scales.unbind(), strict=True)]
        torch._foreach_mul_(new, torch._foreach_sign(squares))  # 0 where v is 0
        meant = torch._foreach_sub(new, torch._foreach_mul(momenta, beta1))
        torch._foreach_div_(meant, 1 - beta1)
        torch._foreach_mul_(fresh, beta2)
        torch._foreach_addcmul_(fresh, meant, meant, value=1 - beta2)
        torch._foreach_copy_(momenta, new)
        of_squares, of_fresh = (roots(each, group) for each in (squares, fresh))
        ratios = torch.stack(torch._foreach_max(torch._foreach_div(of_squares, of_fresh)))
        if group["weight_decay"]:
            updates = pieces.directions()
            bare = torch._foreach_sub(updates, pieces.weights, alpha=group["weight_decay"])
            own, whole = (torch.stack(torch._foreach_norm(each)) for each in (bare, updates))
            ratios = torch.lerp(torch.ones_like(ratios), ratios, (own / whole.clamp(min=1e-30)).clamp(max=1.0))
        least, most, _ = self.factors
        return ratios.clamp(least, most)
