"""``SumsValues``: optimizers that choose what the ranks sum in a step: gradients, values made of them, or nothing.

    sums()         what is summed            in the optimizer's ``step()``, ``.grad`` is
    "gradients"    gradients, in backward    the gradient
    "values"       what ``to_sum`` writes    the mean of the ranks' values, which a wire format has encoded
    "nothing"                                this rank's own gradient

Momenta and updates change slowly, so what an encoding loses of them can be fed back; and values can be summed less
often than gradients are made. Every rank holds all of the optimizer state (stage 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shoal.optim.whole import ParameterPart

Sums = Literal["gradients", "values", "nothing"]


@dataclass(frozen=True)
class OwnValues:
    """One range of main parameters before the sum.

    Args:
        param: the range, by which the optimizer keeps state. Shape: [numel].
        group: its hyperparameters.
        values: this rank's own gradient, whose mean over the ranks is the gradient; ``to_sum`` overwrites it with what
            is summed. Shape: [numel].
        parts: the parameters in it that have a gradient on some rank, for optimizers of whole tensors.
    """

    param: torch.nn.Parameter
    group: dict[str, Any]
    values: torch.Tensor
    parts: tuple[ParameterPart, ...] = ()
    num_parameters: int = 0  # in the range, also without a gradient


class SumsValues:
    """Mixin of a ``torch.optim.Optimizer``, named first. What it decides depends on ``num_steps`` alone."""

    num_steps = 0  # that were applied
    has_local_steps = False  # True if some steps sum nothing, so that the ranks' parameters differ after them

    def sums(self) -> Sums:
        """What the ranks sum in the next step."""
        raise NotImplementedError  # each optimizer's own. No ABC: its metaclass excludes those of DeepSpeed's classes

    def to_sum(self, ranges: Sequence[OwnValues]) -> None:
        """Overwrite ``values`` with what is summed; the step will be applied."""
        raise NotImplementedError  # as above

    def drops_errors(self) -> bool:
        """True if from the next step on other values are summed, so that what earlier sums lost is of no use."""
        return False

    def offset(self, param: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor | None:
        """What main parameters of a range have more than this rank's parameters; None: nothing. Shape: [numel]."""
        return None

    def pending(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """What a rank has not summed yet of a range; None: nothing. Shape: [numel]."""
        return None

    def settle(self, param: torch.nn.Parameter, group: dict[str, Any], mean: torch.Tensor) -> None:
        """The ranks have summed ``pending``: update main parameters and state by the mean. Shape: [numel]."""
