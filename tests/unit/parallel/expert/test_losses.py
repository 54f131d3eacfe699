"""Auxiliary losses of routers against direct formulas, with gradients."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.expert.losses import (
    global_batch_loss,
    gshard_loss,
    router_z_loss,
    sequence_loss,
    switch_loss,
    tokens_per_expert,
)

TOKENS, EXPERTS, K = 24, 6, 2


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, generator=generator).to(dtype).requires_grad_()


def by_loops(probabilities: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """sum over i of E * c_i / (T * k) * P_i, one choice at a time."""
    total = torch.zeros(())
    for token in range(index.shape[0]):
        for expert in index[token].tolist():
            total = total + probabilities[:, expert].mean() / index.numel()
    return total * probabilities.shape[1]


def equal_with_gradients(build_ours: object, build_direct: object, source: torch.Tensor) -> None:
    ours, direct = build_ours, build_direct
    assert isinstance(ours, torch.Tensor) and isinstance(direct, torch.Tensor)
    torch.testing.assert_close(ours, direct)
    (own,) = torch.autograd.grad(ours, source, retain_graph=True)
    (expected,) = torch.autograd.grad(direct, source, retain_graph=True)
    assert own.abs().max() > 0
    torch.testing.assert_close(own, expected)


def test_choices_are_counted_by_expert_and_dropped_ones_are_not() -> None:
    index = torch.tensor([[0, 2], [2, -1], [-1, -1], [5, 2]])
    assert tokens_per_expert(index, EXPERTS).tolist() == [1, 0, 3, 0, 0, 1]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_switch_loss_is_its_formula(k: int) -> None:
    source = logits()
    probabilities = source.softmax(-1)
    index = probabilities.topk(k).indices
    equal_with_gradients(switch_loss(probabilities, index), by_loops(probabilities, index), source)


def test_the_gradient_of_the_switch_loss_is_the_analytic_one() -> None:
    source = logits()
    probabilities = source.softmax(-1)
    index = probabilities.topk(K).indices
    share = EXPERTS * tokens_per_expert(index, EXPERTS).float() / index.numel()
    (own,) = torch.autograd.grad(switch_loss(probabilities, index), source)
    p = probabilities.detach()
    torch.testing.assert_close(own, p * (share - (p * share).sum(-1, keepdim=True)) / TOKENS)


def test_balanced_experts_have_a_loss_of_one_and_one_expert_for_all_has_the_number_of_experts() -> None:
    uniform = torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)
    each = torch.arange(EXPERTS).unsqueeze(1)
    assert switch_loss(uniform, each).item() == pytest.approx(1)
    assert gshard_loss(uniform, each).item() == pytest.approx(1)
    assert sequence_loss(uniform, each, 1).item() == pytest.approx(1)
    collapsed = torch.eye(EXPERTS)[torch.zeros(8, dtype=torch.long)]
    assert switch_loss(collapsed, torch.zeros(8, 1, dtype=torch.long)).item() == pytest.approx(EXPERTS)


def test_the_gshard_loss_counts_first_choices_only() -> None:
    source = logits()
    probabilities = source.softmax(-1)
    index = probabilities.topk(2).indices
    mask = torch.nn.functional.one_hot(index[:, 0], EXPERTS).float()
    as_deepspeed = (probabilities.mean(0) * mask.mean(0)).mean() * EXPERTS * EXPERTS
    equal_with_gradients(gshard_loss(probabilities, index), as_deepspeed, source)


def test_the_sequence_loss_is_the_mean_of_the_sequences_losses() -> None:
    source = logits()
    scores = source.sigmoid()
    index = scores.topk(K).indices
    probabilities = scores / scores.sum(-1, keepdim=True)
    parts = [by_loops(p, i) for p, i in zip(probabilities.chunk(3), index.chunk(3), strict=True)]
    equal_with_gradients(sequence_loss(scores, index, 3), torch.stack(parts).mean(), source)


def test_dropped_choices_of_one_sequence_are_not_counted_in_another() -> None:
    scores = torch.full((4, 2), 0.5)
    index = torch.tensor([[0], [-1], [1], [-1]])
    assert sequence_loss(scores, index, 2).item() == pytest.approx(1)


def test_the_z_loss_is_its_formula() -> None:
    source = logits()
    direct = torch.stack([row.exp().sum().log() ** 2 for row in source]).mean()
    equal_with_gradients(router_z_loss(source), direct, source)


def test_losses_of_16_bit_scores_are_in_fp32() -> None:
    source = logits(dtype=torch.bfloat16)
    index = source.topk(K).indices
    losses = [switch_loss(source.softmax(-1), index), sequence_loss(source.sigmoid(), index, 2), router_z_loss(source)]
    assert [loss.dtype for loss in losses] == [torch.float32] * 3
    sum(losses).backward()
    assert source.grad is not None and source.grad.dtype == torch.bfloat16


def test_without_tokens_every_loss_is_zero() -> None:
    empty, index = torch.empty(0, EXPERTS), torch.empty(0, K, dtype=torch.long)
    assert switch_loss(empty, index).item() == router_z_loss(empty).item() == 0


def test_the_global_loss_of_the_ranks_has_the_gradient_of_the_whole_batch() -> None:
    sources = [logits(seed) for seed in range(3)]
    whole = torch.cat(sources)
    probabilities = whole.softmax(-1)
    expected = switch_loss(probabilities, probabilities.topk(K).indices)
    gradients = torch.autograd.grad(expected, sources)

    def one() -> tuple[torch.Tensor, torch.Tensor]:
        comm = current_world().communicator("dp", Mesh.of(3))
        own = sources[comm.rank].detach().requires_grad_()
        scores = own.softmax(-1)
        loss = global_batch_loss(scores, scores.topk(K).indices, comm)
        (gradient,) = torch.autograd.grad(loss, own)
        return loss.detach(), gradient / 3

    found = run_ranks(3, one)
    torch.testing.assert_close(torch.stack([loss for loss, _ in found]).mean(), expected.detach())
    for (_, gradient), wanted in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_counts_of_earlier_micro_batches_take_part() -> None:
    first, second = logits(0).softmax(-1), logits(1).softmax(-1)
    counts = sum(tokens_per_expert(p.topk(K).indices, EXPERTS) for p in (first, second))
    assert isinstance(counts, torch.Tensor)
    share = counts.float() / counts.sum()
    expected = EXPERTS * (share * second.mean(0)).sum()
    torch.testing.assert_close(switch_loss(second, second.topk(K).indices, counts), expected)
