"""Finds the layer whose router gave scores that are not finite, once a step has failed.

self.router_check = RouterCheck()        in the layer's constructor
self.router_check.note(l_aux)            in its forward: one addition on the device, no synchronization
"""

from __future__ import annotations

import torch
from torch import nn


class RouterCheck:
    """Whether the router of a layer gave scores that are not finite since the last look."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def note(self, value: torch.Tensor) -> None:
        """Take ``value``, which is not finite if some score is not. Shape: []."""
        value = value.detach()
        self._sum = value if self._sum is None else self._sum + value

    def is_bad(self) -> bool:
        """Was some value not finite? Begins anew. Order: blocks the host."""
        noted, self._sum = self._sum, None
        return noted is not None and not bool(noted.isfinite())


def first_bad_router(model: nn.Module) -> str | None:
    """The name of the first layer, in the model's order, whose router gave scores that are not finite."""
    checks = ((name, getattr(module, "router_check", None)) for name, module in model.named_modules())
    bad = [name for name, check in checks if isinstance(check, RouterCheck) and check.is_bad()]
    return bad[0] if bad else None
