"""Models with experts, in both forms, with the plainest dispatch: every expert-parallel rank sees all tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from shoal.comm import autograd
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.held import ExpertsHeld
from tests.helpers.models import VOCABULARY

WIDTH, NUM_EXPERTS = 8, 4


def _sum_of_experts(hidden: torch.Tensor, share: torch.Tensor, held: ExpertsHeld, run: object) -> torch.Tensor:
    """The sum over all experts of share x output. Shapes: [tokens, width], [tokens, experts]."""
    assert callable(run)
    if held.comm is not None:
        hidden = autograd.all_gather(hidden, held.comm, label="tokens")
        share = autograd.all_gather(share, held.comm, label="shares")
    parts = [run(local, hidden) * share[:, expert, None] for local, expert in enumerate(held.ids)]
    total = torch.stack(parts).sum(0)
    return total if held.comm is None else autograd.reduce_scatter(total, held.comm, label="outputs")


class StackedExperts(nn.Module):
    """Each parameter is [experts, ...]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.zeros(NUM_EXPERTS, WIDTH))
        self.experts_held = ExpertsHeld(NUM_EXPERTS)

    def reset_parameters(self) -> None:
        for parameter in (self.up, self.down):
            nn.init.normal_(parameter, std=0.25)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        def run(local: int, rows: torch.Tensor) -> torch.Tensor:
            return torch.relu(rows @ self.up[local]) @ self.down[local] + self.bias[local]

        return _sum_of_experts(hidden, share, self.experts_held, run)


class ListedExperts(nn.ModuleList):
    """This rank's experts, each a module."""

    def __init__(self, ep_size: int) -> None:
        held = ExpertsHeld(NUM_EXPERTS, ep_size, stack=None)
        one = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        super().__init__(copy.deepcopy(one) for _ in range(held.num_local))
        self.experts_held = held

    def forward(self, hidden: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return _sum_of_experts(hidden, share, self.experts_held, lambda local, rows: self[local](rows))


class ExpertBlock(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = self.norm(hidden).flatten(0, -2)
        return hidden + self.experts(flat, self.router(flat).softmax(-1)).view(hidden.shape)


class ExpertModel(nn.Module):
    """Token loss of two blocks with experts."""

    def __init__(self, ep_size: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            ExpertBlock(StackedExperts() if ep_size is None else ListedExperts(ep_size)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class RoutedExperts(StackedExperts):
    """Two experts of each token."""

    rows = 0

    def forward(self, hidden: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        weights, index = share.topk(2, dim=-1)

        def compute(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            self.rows += len(rows)
            hidden = torch.relu(grouped_linear(rows, self.up, counts))
            return grouped_linear(hidden, self.down, counts, self.bias)

        return run_experts(hidden, index, weights, compute, self.experts_held)

    @staticmethod
    def num_rows(model: nn.Module) -> int:
        """Rows that this rank's experts have computed, of all layers."""
        return sum(module.rows for module in model.modules() if isinstance(module, RoutedExperts))


class RoutedModel(ExpertModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.experts = RoutedExperts()


class WideModel(ExpertModel):
    """Matrices so large that the gaps between parameters do not count."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            experts = block.experts
            experts.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2048) / 4)
            experts.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2048, WIDTH) / 4)
            block.router = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, NUM_EXPERTS))
