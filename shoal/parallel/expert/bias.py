"""The tokens of each expert, counted; and a bias that balances them, which takes part in the selection only.

    scores = sigmoid(hidden @ gate)
    expert_index = (scores + bias).topk(k)         weights are made of the scores, without the bias
    after each step:  bias += coeff * sign(mean load - load)

An expert with fewer tokens than the mean is chosen more often in the next step, without an auxiliary loss. The bias is
a buffer: it has no gradient, checkpoints have it, and it is the same on all ranks, because the loads are the sums over
all of them. Loads are counted on the device in forward, and read between steps.

Source: arXiv:2408.15664, algorithm 1; arXiv:2412.19437, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.device import in_backward

BIAS_NAMES = ("expert_bias", "e_score_correction_bias")  # Shoal's layers; transformers (DeepSeek V3, GLM, MiniMax)


def add_bias(gate: nn.Module, num_experts: int) -> torch.Tensor:
    """Give ``gate`` a bias of zeros as a buffer, which stays in fp32 where parameters are 16-bit. Shape: [experts]."""
    bias = torch.zeros(num_experts, dtype=torch.float32)
    gate.register_buffer(BIAS_NAMES[0], bias)
    named = getattr(gate, "_keep_in_fp32_modules_strict", None) or ()
    vars(gate)["_keep_in_fp32_modules_strict"] = {*named, BIAS_NAMES[0]}
    return bias


def bias_of(layer: nn.Module, num_experts: int) -> torch.Tensor | None:
    """The buffer in ``layer`` that is added to the scores for the selection; None: it has none."""
    for name, buffer in layer.named_buffers():
        if name.rsplit(".", 1)[-1] in BIAS_NAMES and buffer.numel() == num_experts:
            return buffer
    return None


@torch.no_grad()
def update_bias(bias: torch.Tensor, load: torch.Tensor, coeff: float) -> None:
    """Move the bias by ``coeff`` against the load, in place.

    Args:
        load: tokens of each expert in the step, over all ranks. Shape: [experts].

    Order: the host does not wait for the device.
    """
    load = load.float()
    bias.add_(torch.sign(load.mean() - load).view_as(bias), alpha=coeff)


class ExpertLoad:
    """Tokens that this rank's router has sent to each expert of one layer, since the last ``take()``.

    Counts of training only: a module in evaluation, and a pass that recomputes activations, add nothing.

    Args:
        module: of the layer; tokens count while it is in training.
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
