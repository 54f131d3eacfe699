"""The tokens that each expert of a layer gets: counted in forward, on the device, and read between steps."""

from __future__ import annotations

import torch
from torch import nn

from shoal.device import in_backward


class ExpertLoad:
    """Tokens that this rank's router has sent to each expert of one layer, since the last ``take()``.

    Counts of training only: a module in evaluation, and a pass that recomputes activations, add nothing.

    Args:
        module: of the layer; is it in training?
        num_experts: of the whole layer.
    """

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._module = module
        self._num_experts = num_experts
        self._counts: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, counts: torch.Tensor) -> None:
        """Add the choices of one forward. Shape: [num_experts]. Order: the host does not wait for the device."""
        if not self._module.training or in_backward():
            return
        if self._counts is None:
            self._counts = torch.zeros(self._num_experts, dtype=torch.int64, device=counts.device)
        self._counts += counts

    def take(self, device: torch.device) -> torch.Tensor:
        """The counts, which begin again at zero. Shape: [num_experts] int64."""
        counts, self._counts = self._counts, None
        return torch.zeros(self._num_experts, dtype=torch.int64, device=device) if counts is None else counts


def imbalance(load: torch.Tensor) -> float:
    """The most loaded expert's tokens over the mean; 1 where balanced, and where there are no tokens."""
    mean = load.double().mean().item()
    return load.max().item() / mean if mean else 1.0
