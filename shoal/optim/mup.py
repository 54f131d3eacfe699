"""Parameter groups of mu-parametrization: learning rates by the width of each parameter.

    parameter                        Adam                          SGD
    two dims that grow (a matrix)    lr / width                    lr * fan_out growth / fan_in growth
    one dim that grows (a vector)    lr                            lr * width
    none                             lr                            lr

A width is how many times wider a dim is than in the base model. ``mup.set_base_shapes(model, base)`` records it in each
parameter's ``infshape``. Weight decay that multiplies the rate is scaled the other way, so that the product stays.

Source: Tensor Programs V (arXiv:2203.03466), table 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shoal.errors import OptimizerError


def scaled_groups(groups: Iterable[dict[str, Any]], settings: dict[str, Any], *, is_sgd: bool) -> list[dict[str, Any]]:
    """The groups, each split by the factor of its rate.

    Args:
        settings: of the optimizer; ``lr`` and ``weight_decay`` are those of groups that have none.

    Raises: OptimizerError: a parameter without ``infshape``, or with more than two dims that grow.
    """
    is_decoupled = bool(settings.pop("decoupled_wd", False))
    made = []
    for group in groups:
        lr = group.get("lr", settings.get("lr", 1e-3))
        decay = group.get("weight_decay", settings.get("weight_decay", 0.0))
        by_factor: dict[float, list[Any]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(_factor(parameter, is_sgd=is_sgd), []).append(parameter)
        for factor, parameters in by_factor.items():
            scaled = decay if is_decoupled else decay / factor
            made.append({**group, "params": parameters, "lr": lr * factor, "weight_decay": scaled})
    return made


def _factor(parameter: torch.Tensor, *, is_sgd: bool) -> float:
    """What the rate of a parameter is multiplied by."""
    shape: Any = getattr(parameter, "infshape", None)
    if shape is None:
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} has no infshape: its width in the base model is not known.",
            where="optimizer.type",
            do="call mup.set_base_shapes(model, base) before initialize().",
            code="optimizer-mup",
        )
    num_growing = shape.ninf()
    if num_growing > 2:
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} has {num_growing} dims that grow with the width.",
            where="optimizer.type",
            do="use an optimizer without mu-parametrization for it.",
            code="optimizer-mup",
        )
    if num_growing == 2:
        return 1.0 / float(shape.fanin_fanout_mult_ratio() if is_sgd else shape.width_mult())
    return float(shape.width_mult()) if is_sgd and num_growing == 1 else 1.0
