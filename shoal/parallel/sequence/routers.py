"""The load balance loss of Transformers' routers, of whole sequences of which ranks of ``sp`` and ``cp`` hold parts.

    E  x  sum over experts of (share of the tokens that chose it) x (mean probability)        arXiv:2101.03961, (4)

Both factors are means over the tokens, so the mean of the ranks' losses is not the loss of all tokens. The models'
modules have a function for it, called with the router logits of all layers; Shoal's takes its place, and is the
model's own where no sequence is spread over ranks.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel.sequence.context import current_sequence_context, sum_over_sequence

_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balance_whole_sequences(model: nn.Module) -> None:
    """Let the routers' loss of a model of Transformers be that of whole sequences, in training."""
    for name in {each.__module__ for module in model.modules() for each in type(module).__mro__}:
        source: Any = sys.modules.get(name)
        own: Any = getattr(source, "load_balancing_loss_func", None)
        is_own = callable(own) and not isinstance(own, _WholeBalance)
        if is_own and list(inspect.signature(own).parameters) == _ARGUMENTS:
            source.load_balancing_loss_func = _WholeBalance(own)


class _WholeBalance:
    """Transformers' function; under a context the loss of all ranks' tokens, the same on every rank."""

    def __init__(self, alone: Any) -> None:
        self.alone = alone

    def __call__(
        self, gate_logits: Any, num_experts: int = 0, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        """
        Args:
            gate_logits: of each layer: [tokens of this rank, experts].
            attention_mask: [B, L of this rank]; 0 where a token does not count.

        Communicates: one sum of 2 E + 1 numbers, and in backward one of E.
        """
        context = current_sequence_context()
        is_spread = context is not None and context.size > 1 and not context.is_alone
        if not is_spread or not isinstance(gate_logits, tuple) or not torch.is_grad_enabled():
            return self.alone(gate_logits, num_experts, top_k, attention_mask)
        device = gate_logits[0].device
        counts = torch.zeros(num_experts + 1, device=device)  # of each expert's tokens; and of all rows
        sums = torch.zeros(num_experts, device=device)
        for logits in gate_logits:
            probabilities = logits.to(device).softmax(-1)
            chosen = probabilities.topk(top_k, -1).indices
            row = torch.ones(len(logits), device=device) if attention_mask is None else attention_mask.reshape(-1)
            row = row.to(sums)
            counts[:-1].scatter_add_(0, chosen.reshape(-1), row.repeat_interleave(top_k))
            counts[-1] += row.sum()
            sums = sums + (probabilities.float() * row[:, None]).sum(0)
        counts, sums = sum_over_sequence(counts, "tokens of experts"), sum_over_sequence(sums, "router probabilities")
        return num_experts * (counts[:-1] / counts[-1] * (sums / counts[-1])).sum()
