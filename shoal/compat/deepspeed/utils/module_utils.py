"""``deepspeed.utils.module_utils``: a module inside a model, by its dotted name."""

from __future__ import annotations

from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, parameter or attribute of that dotted name."""
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put ``module`` in the place of that dotted name."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


__all__ = ["recursive_getattr", "recursive_setattr"]
