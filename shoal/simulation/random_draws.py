"""Random numbers of a forward pass along each mesh axis: equal for what is replicated, others for each rank's part.

Simulated ranks draw no values: ranks whose generators have one seed draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shoal.simulation.spreads import VARIES, Kind, OperatorCall

Need = Literal["equal", "other", ""]
_WHAT = {
    "equal": "the ranks draw other random numbers for a tensor that all of them have: their copies differ",
    "other": "the ranks draw the same random numbers, each for its own part or samples: give each another seed",
}


@dataclass
class RandomDraw:
    """One call of an operator. ``needs``: by axis, once its numbers have met other tensors."""

    operator: str
    place: str
    seed: int
    needs: tuple[Need, ...] = field(default=(), compare=False)


def draw_of(operator: Any, call: OperatorCall, place: str) -> RandomDraw | None:
    """The draw of a call; None: it draws nothing."""
    if torch.Tag.nondeterministic_seeded not in operator.tags or not call.outs:
        return None
    for number, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p" and not call.argument(number, "dropout_p", 0.0):
            return None
    generator = call.kwargs.get("generator") or torch.default_generator
    return RandomDraw(str(operator), place, generator.initial_seed())


def need_of(numbers: torch.Tensor, others: Sequence[tuple[torch.Tensor, Kind]], *, is_data: bool) -> Need:
    """What an axis asks of random numbers that are combined with tensors of these kinds.

    Args:
        is_data: its ranks have other samples or positions, and what they have in common is parameters.
    """
    if any(kind is VARIES for _, kind in others):
        return "other" if is_data and numbers.numel() > 1 else ""
    ends = [tensor.dim() - kind for tensor, kind in others if isinstance(kind, int)]  # dims from the last one
    if not ends:
        return "" if is_data else "equal"
    return "other" if all(end <= numbers.dim() and numbers.shape[-end] > 1 for end in ends) else "equal"


def wrong_draws(
    draws: Sequence[RandomDraw], of_other: Sequence[RandomDraw], axis: int
) -> Iterator[tuple[str, RandomDraw]]:
    """What is wrong, with the draw, of two ranks that differ in their place on an axis."""
    for draw, other in zip(draws, of_other, strict=False):
        if draw.operator != other.operator:
            return
        need = draw.needs[axis] if draw.needs else ""
        if need and (draw.seed == other.seed) != (need == "equal"):
            yield _WHAT[need], draw
