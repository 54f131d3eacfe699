"""A feed-forward layer of experts whose weights are stacked: one parameter for all experts that a rank holds.

    hidden [tokens, D] -> router -> the k best experts of each token -> their two matrices around a GELU -> weighted sum

Letters: D hidden size, F inner size, E experts. Every token reaches its experts: none is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.gpt import INIT_STD, GPTConfig, Linear, residual_std
from shoal.parallel.expert.bias import bias_of
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import feed_forward
from shoal.parallel.expert.held import ExpertsHeld, SplitDim, Stack
from shoal.parallel.expert.losses import router_z_loss, switch_loss, tokens_per_expert
from shoal.parallel.sequence.context import sum_over_sequence


class StackedExperts(nn.Module):
    """Experts of two matrices around a GELU.

    Args:
        std: standard deviation of the initial ``down``; that of ``up`` is 0.02.
    """

    up: nn.Parameter  # [experts, D, F]
    down: nn.Parameter  # [experts, F, D]

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int, std: float = INIT_STD) -> None:
        super().__init__()
        self.std = std
        self.experts_held = ExpertsHeld(num_experts, stack=Stack({"up": SplitDim(2), "down": SplitDim(1)}, ""))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size))
        self.down = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=INIT_STD)
        nn.init.normal_(self.down, std=self.std)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """
        Args:
            rows: [rows, D], sorted by expert.
            counts: the rows of each expert that this rank holds.
        """
        activation = partial(F.gelu, approximate="tanh")
        return feed_forward(rows, counts, self.experts_held, self.up, self.down, activation)


class Router(Linear):
    """Scores of all experts, computed in fp32."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows.float(), self.weight.float())


class ExpertFeedForward(nn.Module):
    """The feed-forward layer of a GPT's block with experts.

    Args:
        config: its ``num_experts``, each as large as the feed-forward layer of a block without experts.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.auxiliary_loss, self.z_loss = config.auxiliary_loss, config.z_loss
        self.router = Router(config.hidden_size, config.num_experts)
        self.experts = StackedExperts(
            config.num_experts, config.hidden_size, 4 * config.hidden_size, residual_std(config)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            hidden: [..., D].

        Returns: the output, as ``hidden``; and the losses of the router times their coefficients, [] in fp32.
        """
        rows = hidden.flatten(0, -2)
        logits = self.router(rows)  # [tokens, E]
        probabilities = logits.softmax(-1)
        bias = bias_of(self.router, logits.shape[-1])
        chosen = (probabilities if bias is None else probabilities + bias).topk(self.experts_per_token).indices
        weights = probabilities.gather(-1, chosen)  # [tokens, k], as chosen
        weights = weights / weights.sum(-1, keepdim=True)
        held = self.experts.experts_held
        out = run_experts(rows, chosen, weights.to(rows.dtype), self.experts, held, may_drop=False)
        # Of whole sequences: of which tensor-parallel ranks hold parts, and those of ``sp`` and ``cp``, over which the
        # loss is averaged, so that only the counts differ from those of one rank.
        whole = held.tensor.of_all_tokens
        probabilities, chosen = whole(probabilities), whole(chosen)
        counts = tokens_per_expert(chosen, logits.shape[-1]).float()
        if logits.requires_grad:
            counts = sum_over_sequence(counts, "tokens of experts")
        balance = switch_loss(probabilities, chosen, counts)
        loss = self.auxiliary_loss * balance + self.z_loss * router_z_loss(whole(logits))
        return out.view_as(hidden), loss
