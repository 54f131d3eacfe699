"""How many tokens an expert takes from one rank, and which ones where more are routed to it."""

from __future__ import annotations

import math

import numpy
import torch


def capacity_of(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """The most tokens of one rank that an expert takes: ``ceil(tokens / experts * factor)``, or ``min_capacity``.

    In fp32, as DeepSpeed computes it: 10 tokens an expert with a factor of 1.1 are 11, not the 12 that fp64 rounds to.

    Args:
        factor: of the gate, times the experts that a token goes to.
    """
    wanted = math.ceil(numpy.float32(num_tokens / num_experts) * numpy.float32(factor))
    return max(wanted, min_capacity)


def kept_by_score(scores: torch.Tensor, capacity: int) -> torch.Tensor:
    """Of each expert, the ``capacity`` tokens with the highest scores.

    Args:
        scores: 0 where a token is not routed to an expert. Shape: [tokens, experts].

    Returns: a mask, of any value where a token is not routed to an expert. Shape: [tokens, experts].
    """
    if capacity >= len(scores):
        return torch.ones_like(scores, dtype=torch.bool)
    highest = torch.topk(scores, k=capacity, dim=0, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, highest, True)


def positions(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many earlier entries of ``experts`` name the same expert.

    Args:
        experts: numbers from 0; -1 for a token that goes nowhere, whose position means nothing. Shape: [entries].

    >>> positions(torch.tensor([1, 0, 1, 1, 0]), 2)
    tensor([0, 0, 1, 2, 1])
    """
    order = experts.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, experts + 1, torch.ones_like(experts))
    starts = counts.cumsum(0) - counts
    in_order = torch.arange(len(experts), device=experts.device) - starts[experts[order] + 1]
    return torch.empty_like(experts).scatter_(0, order, in_order)
