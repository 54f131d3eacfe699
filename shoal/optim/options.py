"""Checks that Shoal's own optimizers have in common: of their numbers, all in one error, and of sparse gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.errors import OptimizerError


def check_options(
    kind: str,
    *,
    not_negative: Mapping[str, float | torch.Tensor],
    betas: tuple[float, float],
    others: Mapping[str, bool] | None = None,
) -> None:
    """Check the numbers that optimizers have in common, and others.

    Args:
        others: by message, whether it applies.

    Raises: OptimizerError: a number outside its range.
    """
    wrong = [f"{name} is {value}, expected 0 or above" for name, value in not_negative.items() if not value >= 0]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        wrong.append(f"betas are {betas}, expected two numbers in [0, 1)")
    wrong += [text for text, is_wrong in (others or {}).items() if is_wrong]
    if wrong:
        raise OptimizerError("; ".join(wrong) + ".", where=kind, code="optimizer-params")


def refuse_sparse(kind: str, parameter: torch.Tensor) -> None:
    """Raises: OptimizerError: the parameter's gradient is sparse."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise OptimizerError(
            f"{kind} takes no sparse gradients (parameter of shape {tuple(parameter.shape)}).",
            do="use sparse=False for the embedding.",
            code="optimizer-sparse",
        )
