"""Attention sinks (GPT-OSS) over ranks: the numbers of one rank, their gradient included."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.context import SequenceContext
from tests.ranks.parallel.sequence.test_attention import HEADS, PACKED, allowed, context_of, tensors

Numbers = list[torch.Tensor]
NAMES = ("output", "query", "key", "value", "sinks")


def sinks_of(heads: int) -> torch.Tensor:
    """Of these one takes nearly all of the probability, and one nearly nothing."""
    return torch.cat((torch.tensor([6.0, -30.0]), torch.randn(heads, generator=torch.Generator().manual_seed(heads))))[
        :heads
    ]


def expected(whole: Numbers, sinks: torch.Tensor, mask: torch.Tensor, softcap: float | None = None) -> Numbers:
    """The output and four gradients by all scores on one rank, in fp64."""
    query, key, value, gradient = (tensor.double() for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sinks.double())]
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).mT / query.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = torch.cat((scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)), -1)
    out = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(repeats, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def found(context: SequenceContext, whole: Numbers, sinks: torch.Tensor, **options: Any) -> Numbers:
    """This rank's output and gradients; those of the sinks summed over the ranks."""
    query, key, value, gradient = (context.shard(tensor, 2) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sinks.clone())]
    out = attention(*leaves[:3], sinks=leaves[3], context=context, **options)
    assert out.dtype == query.dtype
    gradients = list(torch.autograd.grad(out, leaves, gradient))
    for comm in (context.sp, context.cp):
        if comm is not None:
            comm.all_reduce(gradients[3], label="check").drain()
    return [out.detach(), *gradients]


def compare(context: SequenceContext, mine: Numbers, wanted: Numbers, bound: float) -> None:
    for name, one, theirs in zip(NAMES, mine, wanted, strict=True):
        part = theirs if name == "sinks" else context.shard(theirs, 2)
        assert (one - part).norm() / theirs.norm().clamp(min=1) < bound, name


@pytest.mark.parametrize("kind", ["ulysses", "ring", "ring-all_gather", "ring-contiguous", "both"])
@pytest.mark.parametrize("size", [2, 4])
def test_sinks_over_ranks_have_the_numbers_of_one_rank(kind: str, size: int) -> None:
    """With windows, packed rows, soft caps, heads that do not divide, and lengths that do not."""
    name, _, option = kind.partition("-")
    given = {"": {}, "all_gather": {"exchange": "all_gather"}, "contiguous": {"order": "contiguous"}}[option]
    cases = []
    for length, is_causal, packed, window in itertools.product((24, 21), (True, False), (True, False), (None, 3, 9)):
        heads, key_heads = HEADS[(length + (window or 1) + is_causal + 2 * packed) % len(HEADS)]
        softcap = 1.5 if (window == 3) == packed else None
        whole, documents = tensors(heads, key_heads, length), PACKED[length] if packed else None
        wanted = expected(whole, sinks_of(heads), allowed(documents, length, is_causal, window), softcap)
        options = {"is_causal": is_causal, "documents": documents, "window": window, "softcap": softcap}
        cases.append((length, whole, sinks_of(heads), wanted, options))

    def run() -> None:
        for length, whole, sinks, wanted, options in cases:
            context = context_of(name, length=length, **given)
            compare(context, found(context, whole, sinks, **options), wanted, 1e-6)

    run_ranks(size, run)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
def test_sinks_on_one_rank_with_a_mask_and_with_a_cache_of_keys(dtype: torch.dtype, bound: float) -> None:
    whole, sinks, context = tensors(6, 3, 24, dtype), sinks_of(6).to(dtype), SequenceContext()
    causal = allowed(None, 24, True)
    wanted = expected(whole, sinks, causal)
    compare(context, found(context, whole, sinks, is_causal=True), wanted, bound)
    compare(context, found(context, whole, sinks, mask=causal), wanted, bound)
    query, key, value, _ = whole
    last = attention(query[:, :, -1:], key, value, sinks=sinks)
    assert (last - wanted[0][:, :, -1:]).norm() / last.norm() < bound


def test_a_mask_with_sinks_works_over_heads() -> None:
    whole, sinks = tensors(12, 3, 8), sinks_of(12)
    mask = torch.rand(2, 12, 8, 8) < 0.4  # some positions attend to nothing but the sink
    wanted = expected(whole, sinks, mask)

    def run() -> None:
        context = context_of("ulysses")
        compare(context, found(context, whole, sinks, mask=mask), wanted, 1e-6)

    run_ranks(2, run)


def test_sinks_send_nothing_more_over_the_ring() -> None:
    def run(has_sinks: bool) -> list[tuple[str, str, int]]:
        context, (query, key, value, gradient) = context_of("ring"), tensors(4, 2, 12)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        with current_world().recorder.recording() as entries:
            sinks = sinks_of(4).requires_grad_() if has_sinks else None
            attention(*leaves, is_causal=True, sinks=sinks, context=context).backward(gradient)
        return [(entry.op, entry.label, entry.nbytes) for entry in entries]

    assert run_ranks(2, run, True) == run_ranks(2, run, False)


def test_sinks_of_another_shape_or_beside_a_function_of_scores_are_refused() -> None:
    query, key, value, _ = tensors(4, 2, 8)
    with pytest.raises(UsageError, match=r"sinks of shape \(1, 4\) for 4 heads"):
        attention(query, key, value, sinks=torch.zeros(1, 4))
    with pytest.raises(UsageError, match="a score_mod beside sinks"):
        attention(query, key, value, sinks=torch.zeros(4), score_mod=lambda score, *_: score)
