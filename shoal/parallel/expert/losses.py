"""Auxiliary losses that make a router spread its tokens over the experts.

T tokens, E experts, each token goes to k of them; ``c_i`` of the T * k choices are of expert i, and ``P_i`` is the mean
probability of expert i over the tokens. Every loss is 1 where the experts are balanced, and a constant in the counts:
its gradient reaches the router through ``P_i``.

    switch_loss        sum over i of  E * c_i / (T * k) * P_i                              arXiv:2101.03961, (4)
    global_batch_loss  the same, with c_i and T of all ranks (P_i is this rank's)          arXiv:2501.11873, (4)
    gshard_loss        the same, with c_i of first choices, and k = 1                      arXiv:2006.16668, algorithm 1
    sequence_loss      the same in each sequence, their mean; P of normalized scores       arXiv:2412.19437, (17)-(20)
    router_z_loss      mean over tokens of (log of the sum of exp(logits)) ** 2            arXiv:2202.08906, (5)

The gradient of ``global_batch_loss``, averaged over the ranks as data parallelism does, is that of ``switch_loss`` over
the global batch where the ranks have equally many tokens: the loss is linear in ``P_i``.

All compute in fp32. ``expert_index`` is [tokens, k] int64; -1 is a choice that is not counted.
"""

from __future__ import annotations

import torch

from shoal.comm.protocol import Communicator


def tokens_per_expert(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many choices are of each expert. Shape: [num_experts] int64. Order: the host does not wait for the device."""
    chosen = expert_index.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, torch.where(chosen < 0, num_experts, chosen), torch.ones_like(chosen))
    return counts[:num_experts]


def switch_loss(
    probabilities: torch.Tensor, expert_index: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """The load balance loss of Switch Transformers, for any k.

    Args:
        probabilities: the router's, of all experts. Shape: [tokens, experts].
        counts: the choices of each expert that the loss is to balance; None: those of ``expert_index``. The sum over
            the micro-batches of a step so far balances the step. Shape: [experts].

    Returns: shape [].
    """
    num_experts = probabilities.shape[-1]
    counts = (tokens_per_expert(expert_index, num_experts) if counts is None else counts).float()
    share = counts / counts.sum().clamp(min=1)
    return num_experts * (share * _mean(probabilities)).sum()


def gshard_loss(probabilities: torch.Tensor, expert_index: torch.Tensor) -> torch.Tensor:
    """The load balance loss of GShard, of each token's first choice, times E ** 2 (as DeepSpeed has it)."""
    return switch_loss(probabilities, expert_index[:, :1])


def global_batch_loss(
    probabilities: torch.Tensor, expert_index: torch.Tensor, comm: Communicator | None
) -> torch.Tensor:
    """:func:`switch_loss` whose counts are of all ranks along ``comm``.

    A batch of one domain may then use few experts, if the global batch uses all.

    Args:
        comm: the ranks that see other tokens; None: this rank alone.

    Communicates: one all-reduce of E numbers; nothing in backward.
    """
    counts = tokens_per_expert(expert_index, probabilities.shape[-1]).float()
    if comm is not None:
        comm.blocking.all_reduce(counts, label="tokens per expert")
    return switch_loss(probabilities, expert_index, counts)


def sequence_loss(scores: torch.Tensor, expert_index: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The complementary loss of DeepSeek-V2 and V3: balance inside each sequence.

    Args:
        scores: not negative: softmax or sigmoid scores. They are divided by their sum over the experts. Shape: [tokens,
            experts]; the tokens of a sequence are neighbours, and all sequences have the same length.

    Returns: the mean over the sequences. Shape: [].
    """
    num_experts, k = scores.shape[-1], expert_index.shape[-1]
    scores = scores.float()
    probabilities = (scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)).view(num_sequences, -1, num_experts)
    first = torch.arange(num_sequences, device=scores.device).view(-1, 1, 1) * num_experts
    chosen = expert_index.view(num_sequences, -1, k)
    of_sequence = torch.where(chosen < 0, -1, chosen + first)
    counts = tokens_per_expert(of_sequence, num_sequences * num_experts).view(num_sequences, num_experts).float()
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return num_experts * (share * probabilities.mean(1)).sum(-1).mean()


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The router z-loss of ST-MoE: keeps the logits small, so that their rounding stays small. Shape: []."""
    return _mean(torch.logsumexp(logits.float(), -1).square().unsqueeze(-1)).squeeze(-1)


def _mean(values: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens; 0 where there are none."""
    return values.float().sum(0) / max(1, values.shape[0])
