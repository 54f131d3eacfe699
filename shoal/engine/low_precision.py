"""Which parameters' gradients are reduced in the dtype of ``torch.autocast``.

Under autocast a linear or convolutional module computes its weights' gradients in low precision and casts them to fp32
at the end. Reducing them in low precision loses little and halves the bytes. Sums are rounded: over several
micro-batches before they are reduced, and at stage 0 over the ranks. So it is done only where the config asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import nn

from shoal.config import Config
from shoal.engine.settings import Plan
from shoal.errors import ConfigError

_KEY = "torch_autocast.lower_precision_safe_modules"


def lower_precision_parameters(model: nn.Module, config: Config, plan: Plan) -> dict[str, torch.dtype]:
    """The reduce dtype by parameter name, where it is not the parameter's own dtype.

    Parameters of these very classes, not of those derived from them, as in DeepSpeed. A shared parameter counts where
    all modules that hold it are of these classes.

    Raises: ConfigError: classes of the config that do not exist; all of them are named.
    """
    given = config.torch_autocast.lower_precision_safe_modules
    if plan.autocast_dtype is None or plan.precision.gradient.reduce_dtype is not None or not given:
        return {}
    classes = _classes(given)
    low: set[int] = set()
    other: set[int] = set()
    for module in model.modules():
        found = low if type(module) in classes else other
        found.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {
        name: plan.autocast_dtype
        for name, parameter in model.named_parameters()
        if id(parameter) in low - other and parameter.dtype == torch.float32
    }


def _classes(paths: Sequence[str]) -> tuple[type[nn.Module], ...]:
    found, wrong = [], []
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            wrong.append(f"{path!r} ({error})")
            continue
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            found.append(kind)
        else:
            wrong.append(f"{path!r} (not a class of modules)")
    if wrong:
        raise ConfigError(
            f"{_KEY} names what is not there: {'; '.join(wrong)}.",
            do='give whole paths of classes, such as "torch.nn.Linear".',
            code="autocast-modules",
        )
    return tuple(found)
