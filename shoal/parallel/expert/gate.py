"""Gates: the experts that each token goes to, with which weights, and the loss that balances them.

    k     first expert                    second expert                        tokens beyond the capacity
    1     the most probable (RSample:     -                                    dropped at random, or (use_rts=False)
          of logits with Gumbel noise)                                         by torch.topk's order of equal values
    2     the most probable               the most probable other, of logits   the last ones; second experts after all
                                          with Gumbel noise                    first ones
    more  the k most probable             ...                                  the least probable

The capacity is counted over what one rank routes, so the same tokens are dropped however the experts are divided among
ranks. Without drops nothing has a capacity.

Shoal's layers take a routing as ``GateResult`` (``sparse_routes``). Otherwise a gate returns DeepSpeed's dense tensors
of ``[tokens, experts, capacity]``: at 4,096 tokens, 8 experts and two experts a token, each has 33 million elements for
8,192 weights.

Source: GShard (arXiv:2006.16668), Switch Transformers (arXiv:2101.03961); DeepSpeed's numbers and random draws.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn import functional

from shoal.comm.world import communicator_of
from shoal.parallel.expert.losses import tokens_per_expert
from shoal.parallel.sequence.context import sum_over_sequence

Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class GateResult(NamedTuple):
    """Where tokens go.

    Args:
        expert_index: -1: the token is dropped. Shape: [tokens, k], int64.
        weights: of the experts' outputs; 0 where the token is dropped. Shape: [tokens, k].
        l_aux: the auxiliary loss. Shape: [].
        exp_counts: tokens routed to each expert, before any is dropped. Shape: [experts], int64.
        capacity: tokens that an expert takes; None: no token is dropped.
    """

    expert_index: torch.Tensor
    weights: torch.Tensor
    l_aux: torch.Tensor
    exp_counts: torch.Tensor
    capacity: int | None


def jitter(tensor: torch.Tensor, epsilon: float = 1e-2) -> torch.Tensor:
    """``tensor`` times uniform random numbers between ``1 - epsilon`` and ``1 + epsilon``."""
    low, high = numpy.float32(1.0 - epsilon), numpy.float32(1.0 + epsilon)
    noise = torch.rand(tensor.shape, dtype=torch.float32, device=tensor.device)
    return tensor * noise.mul_(float(high - low)).add_(float(low))


def gumbel(like: torch.Tensor) -> torch.Tensor:
    """Random numbers of the standard Gumbel distribution, in fp32 and of the shape of ``like``."""
    limits = torch.finfo(torch.float32)
    noise = torch.rand(like.shape, dtype=torch.float32, device=like.device)
    # A draw of 0 becomes the smallest number and 1 is never drawn, so that both logarithms are finite.
    return noise.mul_(1.0 - limits.eps).add_(limits.tiny).log_().neg_().log_().neg_()


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Any:
    """Route each token to one expert.

    Args:
        logits: scores of the router, in fp32. Shape: [tokens, experts].
        used_token: 0 or false for tokens that go nowhere. Shape: [tokens]; None: all are used.
        noisy_gate_policy: ``RSample``: choose by logits with Gumbel noise.
        use_rts: drop tokens at random, not by their place.
        ep_group: of the dense form; see ``dense``.
        sparse_routes: return a ``GateResult``, not the dense form.
        use_tutel: has no effect.
    """
    num_tokens, num_experts = logits.shape
    noisy = logits + gumbel(logits) if noisy_gate_policy == "RSample" else None
    gates = functional.softmax(logits, dim=1)
    index = (gates if noisy is None else noisy).argmax(dim=1, keepdim=True)
    is_kept = torch.ones_like(index, dtype=torch.bool) if used_token is None else used_token.bool().view(-1, 1)
    counts = tokens_per_expert(index.masked_fill(~is_kept, -1), num_experts)
    l_aux = _balance(gates, counts).sum() * num_experts
    capacity = capacity_of(num_tokens, num_experts, capacity_factor, min_capacity) if drop_tokens else None
    # Drawn without drops too: the numbers that are drawn after these are those of a run with DeepSpeed.
    draws = torch.rand_like(gates.detach()) if use_rts else 1
    if capacity is not None:
        routed = torch.zeros_like(gates, dtype=torch.int64).scatter_(1, index, is_kept.long())
        is_kept = is_kept & kept_by_score(routed * draws, capacity).gather(1, index)
    weights = gates.gather(1, index) * is_kept
    routing = GateResult(index.masked_fill(~is_kept, -1), weights, l_aux, counts, capacity)
    return routing if sparse_routes else dense(routing, ep_group)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Any:
    """Route each token to two experts; otherwise as ``top1gating``.

    Args:
        top2_2nd_expert_sampling: choose the second expert by logits with Gumbel noise.
    """
    num_tokens, num_experts = logits.shape
    gates = functional.softmax(logits, dim=1)
    first = gates.argmax(dim=1, keepdim=True)
    noisy = logits.detach() + gumbel(logits) if top2_2nd_expert_sampling else logits.detach()
    second = noisy.scatter(1, first, float("-inf")).argmax(dim=1, keepdim=True)
    of_first, of_second = tokens_per_expert(first, num_experts), tokens_per_expert(second, num_experts)
    l_aux = _balance(gates, of_first).mean() * num_experts * num_experts
    index = torch.cat([first, second], dim=1)
    capacity = capacity_of(num_tokens, num_experts, capacity_factor * 2, min_capacity) if drop_tokens else None
    is_kept = torch.ones_like(index, dtype=torch.bool)
    if capacity is not None:
        is_kept = (positions(index.t().reshape(-1), num_experts) < capacity).view(2, -1).t()
    weights = _normalized(gates.gather(1, index) * is_kept)
    routing = GateResult(index.masked_fill(~is_kept, -1), weights, l_aux, of_first + of_second, capacity)
    return routing if sparse_routes else dense(routing, ep_group, is_by_choice=True)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Any:
    """Route each token to its ``k`` most probable experts; otherwise as ``top1gating``.

    Args:
        drop_policy: ``probs`` drops the least probable tokens of an expert, ``position`` the last ones.
    """
    num_tokens, num_experts = logits.shape
    gates = functional.softmax(logits, dim=1)
    top, index = torch.topk(gates, k=k, dim=1)
    counts = tokens_per_expert(index, num_experts)
    l_aux = _balance(gates, counts).mean() * num_experts * num_experts / k
    capacity = capacity_of(num_tokens, num_experts, capacity_factor * k, min_capacity) if drop_tokens else None
    is_kept = torch.ones_like(index, dtype=torch.bool)
    if capacity is not None and drop_policy == "position":
        is_kept = (positions(index.reshape(-1), num_experts) < capacity).view_as(index)
    elif capacity is not None:
        scores = torch.zeros_like(gates).scatter(1, index, top.detach())
        is_kept = kept_by_score(scores, capacity).gather(1, index)
    weights = _normalized(top * is_kept)
    routing = GateResult(index.masked_fill(~is_kept, -1), weights, l_aux, counts, capacity)
    return routing if sparse_routes else dense(routing, ep_group)


def dense(routing: GateResult, ep_group: Any = None, *, is_by_choice: bool = False) -> Dense:
    """A routing as DeepSpeed's gates return it.

    Args:
        ep_group: without drops, the capacity is the most tokens that any expert gets from a rank of this process group;
            None: from this rank.
        is_by_choice: an expert's tokens are those that chose it first, then those that chose it second; else in order.

    Returns: the auxiliary loss; the weight and whether there is one, by token, expert and place in the expert's buffer
        (shape: [tokens, experts, capacity]); the tokens routed to each expert.
    Communicates: without drops and with ``ep_group``: one number per rank.
    Order: without drops the host waits for the counts.
    """
    num_tokens, num_experts = len(routing.expert_index), len(routing.exp_counts)
    capacity = _largest(routing.exp_counts, ep_group) if routing.capacity is None else routing.capacity
    index = routing.expert_index.t() if is_by_choice else routing.expert_index
    place = positions(index.reshape(-1), num_experts).view_as(index)
    slots = (index * capacity + place).where(index >= 0, num_experts * capacity)  # the dropped ones: a column more
    weights = routing.weights.new_zeros(num_tokens, num_experts * capacity + 1)
    weights = weights.scatter(1, slots.t() if is_by_choice else slots, routing.weights)
    combine = weights[:, :-1].reshape(num_tokens, num_experts, capacity)
    return routing.l_aux, combine, combine.bool(), routing.exp_counts


def _largest(counts: torch.Tensor, group: Any) -> int:
    largest = counts.max().view(1)
    if group is not None and group.size() > 1:
        largest = communicator_of(group).exchange(largest, label="capacity of experts").wait().max()
    return int(largest)


def _balance(gates: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """By expert, its mean probability times its share of the tokens; 0 without tokens. Shape: [experts].

    In training the share is of whole sequences, of which this rank may hold a part. The mean over the ranks, which
    averaging gradients takes, is then that of whole sequences too.
    """
    num_tokens = max(len(gates), 1)
    share = torch.cat([counts.float(), counts.new_full((1,), num_tokens, dtype=torch.float32)])
    if gates.requires_grad:
        share = sum_over_sequence(share, "tokens of experts")
    return gates.sum(dim=0) / num_tokens * (share[:-1] / share[-1])


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Each token's weights divided by their sum; zeros stay zeros."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def capacity_of(num_tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """The most tokens of one rank that an expert takes: ``ceil(tokens / experts * factor)``, or ``min_capacity``.

    In fp32, as DeepSpeed computes it: 10 tokens an expert with a factor of 1.1 are 11, not the 12 that fp64 rounds to.

    Args:
        factor: of the gate, times the experts that a token goes to.
    """
    wanted = math.ceil(_in_fp32(_in_fp32(num_tokens / num_experts) * _in_fp32(factor)))
    return max(wanted, min_capacity)


def _in_fp32(number: float) -> float:
    """``number``, rounded to fp32 by Python's arithmetic, which a compiler can follow."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


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
    counts = tokens_per_expert(experts + 1, num_experts + 1)
    starts = counts.cumsum(0) - counts
    in_order = torch.arange(len(experts), device=experts.device) - starts[experts[order] + 1]
    return torch.empty_like(experts).scatter_(0, order, in_order)
