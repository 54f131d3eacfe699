"""Whether the router of a layer of experts gave weights that are not finite, which is asked once a step has failed."""

from __future__ import annotations

import torch


class RouterCheck:
    """Adds up a router's weights on the device: one sum and one addition a forward, and no synchronization."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def note(self, weights: torch.Tensor) -> None:
        total = weights.detach().sum(dtype=torch.float32)
        before = self._sum
        self._sum = total if before is None or before.device != total.device else before + total

    def is_bad(self) -> bool:
        """True if some weight was not finite since the last call. Order: blocks the host."""
        total, self._sum = self._sum, None
        return total is not None and not bool(total.isfinite())
