"""Checks of the arguments of an optimizer or schedule (names and numbers, in one error), and of sparse gradients."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import OptimizerError
from shoal.text import nearest


def accepted_names(factory: type) -> dict[str, bool]:
    """The keyword parameters of a constructor by name; True: required. Without ``self`` and the first argument."""
    result = {}
    for name, parameter in list(inspect.signature(factory).parameters.items())[1:]:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            result[name] = parameter.default is parameter.empty
    return result


def hint(name: str, names: Collection[str]) -> str:
    """A hint such as `` (did you mean 'betas'?)``, or nothing."""
    return "".join(f" (did you mean {near!r}?)" for near in nearest(name, names, limit=1))


def problems_with(params: Mapping[str, Any], accepted: Mapping[str, bool]) -> list[str]:
    """Messages for unknown names, missing names, and values that are still "auto"."""
    problems = [f"unknown parameter {name!r}{hint(name, accepted)}" for name in params if name not in accepted]
    problems += [
        f"missing parameter {name!r}" for name, required in accepted.items() if required and name not in params
    ]
    problems += [
        f"{name} is 'auto', which only a client such as Transformers or Accelerate can replace by a value"
        for name, value in params.items()
        if value == "auto" and name in accepted
    ]
    return problems


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
    if not _are_betas(betas):
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


def _are_betas(betas: Sequence[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
