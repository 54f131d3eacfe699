"""DeepSpeed's gating functions: a routing as dense tensors of ``[tokens, experts, capacity]``.

Shoal's layers do not use them: at 4,096 tokens, 8 experts and two experts a token, each tensor has 33 million elements
for 8,192 weights.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.world import communicator_of
from shoal.parallel.expert.gate import GateResult, positions, route_top1, route_top2, route_topk

Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    """``route_top1``, in the form of :func:`dense`; as it is with ``sparse_routes``."""
    routing = route_top1(logits, capacity_factor, min_capacity, used_token, noisy_gate_policy, drop_tokens, use_rts)
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
    """``route_top2``, in the form of :func:`dense`; as it is with ``sparse_routes``."""
    routing = route_top2(logits, capacity_factor, min_capacity, drop_tokens, top2_2nd_expert_sampling)
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
    """``route_topk``, in the form of :func:`dense`; as it is with ``sparse_routes``."""
    routing = route_topk(logits, k, capacity_factor, min_capacity, drop_tokens, drop_policy)
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
