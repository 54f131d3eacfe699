"""Experts that Transformers stacks without its common interface, given that interface: those of Llama 4 and DBRX.

Llama 4    every expert gets every token, times its score: zero if the router did not choose the expert. The layer is
           replaced: chosen tokens only, weighted before the experts
DBRX       ``experts.mlp`` has ``w1``, ``v1``, ``w2``, each ``[E x F, D]``: the experts' rows one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from shoal.parallel.expert.extend import extend
from shoal.parallel.expert.grouped import grouped_linear


class Llama4Layer(nn.Module):
    """The layer around the experts of Llama 4."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        layer = cast(Any, self)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = layer.router(tokens)
        if len(routed) == 3:  # of Shoal's router
            logits, weights, chosen = routed
        else:
            scores, logits = routed
            chosen = logits.topk(layer.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        return layer.shared_expert(tokens) + layer.experts(tokens, chosen, weights.to(tokens.dtype)), logits


class Llama4Interface(nn.Module):
    """The common interface for the experts of Llama 4."""

    has_gate, has_bias, is_transposed = True, False, True
    score_before = True
    act_fn: Callable[[Tensor], Tensor]

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class DbrxInterface(nn.Module):
    """The common interface for the experts of DBRX."""

    def compute_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        own = cast(Any, self).mlp
        gate, up, down = (weight.view(-1, own.ffn_hidden_size, own.hidden_size) for weight in (own.w1, own.v1, own.w2))
        inner = own.activation_fn(grouped_linear(rows, gate.transpose(1, 2), counts))
        return grouped_linear(inner * grouped_linear(rows, up.transpose(1, 2), counts), down, counts)


def has_own_layout(experts: nn.Module) -> bool:
    """Whether experts are of one of these families, and none of Shoal's yet."""
    return type(experts).__name__ in ("Llama4TextExperts", "DbrxExperts") and not hasattr(experts, "experts_held")


def adapt(layer: nn.Module, experts: nn.Module) -> None:
    """Give experts of these families the common interface, in place. Others are not changed."""
    if not has_own_layout(experts):
        return
    if type(experts).__name__ == "DbrxExperts":
        extend(experts, DbrxInterface)
    else:
        extend(layer, Llama4Layer)
        extend(experts, Llama4Interface)


def rows_per_expert(experts: nn.Module) -> int:
    """Elements of dim 0 that an expert has in each stacked parameter."""
    return int(cast(Any, experts).ffn_hidden_size) if isinstance(experts, DbrxInterface) else 1
