"""``TokenChoiceTopKRouter``: each token chooses the experts with the highest scores.

logits = hidden W^T + b                     [tokens, experts]
scores = softmax(logits) or sigmoid(logits)
the experts: the top k of scores + bias, of the groups that the token may use
the weights: scores of these experts, without the bias, normalised and scaled
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

from shoal.parallel.expert.bias import BIAS_NAMES, add_bias, bias_of
from shoal.parallel.expert.huggingface import extend


@dataclass(frozen=True)
class Routing:
    """How a router scores experts and chooses among them.

    Args:
        normalises: the weights of a token are divided by their sum.
        scale: factor on the weights.
        groups: the experts are divided into so many groups of neighbours; None: no groups.
        limited_groups: the groups that one token may use.
        group_score: of a group: its highest score (DeepSeek-V2), or the sum of its two highest (DeepSeek-V3).
        in_fp32: whether the logits are computed in fp32.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalises: bool = True
    scale: float = 1.0
    groups: int | None = None
    limited_groups: int | None = None
    group_score: Literal["max", "top2_sum"] = "max"
    in_fp32: bool = False

    def choose(self, logits: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the experts of each token, both [tokens, top_k].

        Args:
            logits: [tokens, num_experts].
            correction: [num_experts], added to the scores when experts are chosen (DeepSeek-V3, arXiv:2412.19437).
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.softmax(-1) if self.score == "softmax" else wide.sigmoid()
        choices = scores if correction is None else scores + correction
        if self.groups is not None and self.groups > 1:
            choices = choices.masked_fill(~self._allowed(choices), float("-inf"))
        chosen = choices.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen

    def _allowed(self, choices: torch.Tensor) -> torch.Tensor:
        """Which experts are in groups that the token may use: [tokens, num_experts]."""
        assert self.groups is not None and self.limited_groups is not None
        grouped = choices.view(len(choices), self.groups, -1)
        if self.group_score == "max":
            best = grouped.amax(-1)
        else:
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        used = torch.zeros_like(best, dtype=torch.bool).scatter_(
            1, best.topk(self.limited_groups, dim=-1).indices, True
        )
        return used.unsqueeze(-1).expand_as(grouped).reshape(choices.shape)


class TokenChoiceTopKRouter(nn.Module):
    """A router with the parameters of the module whose class it extends: ``weight`` [experts, width], ``bias``.

    Returns: the logits, the weights and the experts of each token, as Transformers' routers do.
    """

    routing: Routing
    weight: nn.Parameter

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, weight, bias = (
            hidden.reshape(-1, hidden.shape[-1]),
            cast(torch.Tensor, self.weight),
            getattr(self, "bias", None),
        )
        if self.routing.in_fp32:
            tokens, weight, bias = tokens.float(), weight.float(), None if bias is None else bias.float()
        logits = F.linear(tokens, weight, bias)
        biases = [bias for name in BIAS_NAMES if (bias := getattr(self, name, None)) is not None]
        return logits, *self.routing.choose(logits, sum(biases) if biases else None)


def replace_router(router: nn.Module, routing: Routing, *, needs_bias: bool) -> None:
    """Make a module with a ``weight`` [experts, width] a ``TokenChoiceTopKRouter``.

    Args:
        needs_bias: give it a bias to choose by, zero at first, if it has none that a step can change.
    """
    extend(router, TokenChoiceTopKRouter, routing=routing)
    if needs_bias and bias_of(router, routing.num_experts) is None:
        add_bias(router, routing.num_experts)
