"""Planned times corrected by measured ones: each measurement says something of the plans that share values with it.

log(measured / planned) is a sum of a term that all have (the machine's) and one for each value of each axis, such as
"stage=3" and "micro=8". The terms are normal, with these deviations, and so is the noise; given what was measured, the
rest is normal too. One correction for all would leave the plans in their order, whatever was measured.

Source: Bayesian linear regression as a Gaussian process (Rasmussen and Williams, section 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ALL, _VALUE, _NOISE = 1.0, 0.15, 0.03  # deviations of the terms and of a measurement

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Corrected:
    """``seconds``: expected. ``deviation``: of its logarithm."""

    seconds: float
    deviation: float

    def at_best(self, deviations: float) -> float:
        """Seconds, if it is faster than expected by so many deviations."""
        return self.seconds * math.exp(-deviations * self.deviation)


def corrected(plans: Sequence[tuple[Values, float]], ran: Sequence[tuple[Values, float, float]]) -> list[Corrected]:
    """What plans take, by their values by axis and planned seconds; ``ran``: those of others, and measured seconds."""
    if not plans:
        return []
    known = _likeness([values for values, *_ in ran], [values for values, *_ in ran])
    known += _NOISE**2 * torch.eye(len(ran), dtype=torch.float64)
    shared = _likeness([values for values, _ in plans], [values for values, *_ in ran])
    weights = torch.linalg.solve(known, shared.T)
    ratios = torch.tensor([math.log(seconds / planned) for _, planned, seconds in ran], dtype=torch.float64)
    means = (weights.T @ ratios).tolist()
    alone = [_ALL**2 + len(values) * _VALUE**2 for values, _ in plans]
    explained = (shared * weights.T).sum(1).tolist()
    return [
        Corrected(planned * math.exp(mean), math.sqrt(max(variance - less, 0.0)))
        for (_, planned), mean, variance, less in zip(plans, means, alone, explained, strict=True)
    ]


def _likeness(some: Sequence[Values], others: Sequence[Values]) -> torch.Tensor:
    """Covariances [some, others]: what all share, and for each axis on which both have the same value."""
    rows = [[sum(one[axis] == other[axis] for axis in one) for other in others] for one in some]
    return _ALL**2 + _VALUE**2 * torch.tensor(rows, dtype=torch.float64).reshape(len(some), len(others))
