"""The losses of the step under way: how they were scaled, what undoes that in the gradients, and their mean.

    the script calls              its loss was multiplied by          the gradients must be divided by
    engine.backward(loss)         loss scale / accumulation steps     the loss scale
    engine.scale(loss)            loss scale / accumulation steps     the loss scale
    loss.backward()               nothing, and nobody saw it          the accumulation steps

Without fp16 the loss scale is 1.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.engine.batch import Batch
from shoal.errors import AssertedUsageError, UsageError
from shoal.optim.loss_scale import LossScale


class Losses:
    """The losses that one engine saw since its last step.

    Args:
        loss_scale: fp16's; None: losses keep their size.
        is_managed: are gradients averaged over the accumulation steps?
    """

    def __init__(self, batch: Batch, loss_scale: LossScale | None, *, is_managed: bool) -> None:
        self._batch = batch
        self._loss_scale = loss_scale
        self._is_managed = is_managed
        self.values: list[torch.Tensor] = []
        self.styles: set[str] = set()  # "engine", "scaled"
        self.mean: float | None = None  # of this rank's micro-batches in the last step

    def scaled(self, loss: torch.Tensor, style: str, *, by_accumulation: bool = True) -> torch.Tensor:
        """The loss to go backward from."""
        self.values.append(loss.detach())
        self.styles.add(style)
        scaled = loss
        if by_accumulation and self._batch.num_micro > 1:
            scaled = scaled / self._batch.num_micro
        if self._loss_scale is not None:
            scaled = scaled.float() * self._loss_scale.scale
        return scaled

    def unscale(self) -> float:
        """What the gradients in memory must be multiplied by to be the step's gradients."""
        factor = 1.0
        if not self.styles:  # loss.backward()
            factor /= self._batch.num_micro if self._is_managed else 1
        elif self._loss_scale is not None:
            factor /= self._loss_scale.scale
        return factor

    def compute_mean(self) -> torch.Tensor | None:
        """Their mean, where they are. Shape: [], fp32. The host does not wait for it; ``mean`` is set at the step."""
        if not self.values:
            return None
        return torch.stack([loss.reshape(()).float() for loss in self.values]).mean()

    def refuse_mixed(self, num_plain_passes: int) -> None:
        """Raises: UsageError: besides ``engine.backward(loss)`` there were passes of ``loss.backward()``."""
        if num_plain_passes and self.styles == {"engine"}:
            raise UsageError(
                "one step mixed engine.backward(loss) and loss.backward(): they are scaled differently.",
                do="use one of them, or loss.backward() on engine.scale(loss).",
                code="mixed-backward",
            )

    def forget(self) -> None:
        """The step is over, or given up. The mean stays."""
        self.values.clear()
        self.styles.clear()


def check_for_backward(loss: Any) -> None:
    """Raises: UsageError: it is not one number that depends on a parameter."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            f"the loss must be one number, got {_shape(loss)}.", do="reduce it, e.g. loss.mean().", code="loss-shape"
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter that is trained.",
            do="check torch.no_grad(), detach(), and requires_grad of the parameters.",
            code="loss-detached",
        )


def check_for_scale(loss: Any) -> None:
    """Raises: AssertedUsageError: it is not one number with a graph behind it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise AssertedUsageError(
            f"scale() takes a loss that is a scalar tensor with a graph behind it, got {_shape(loss)}.",
            do="reduce it first, e.g. loss.mean(); for other tensors call tensor.backward(gradient).",
            code="loss-shape",
        )


def _shape(loss: Any) -> tuple[int, ...] | str:
    return tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
