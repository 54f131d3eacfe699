"""Windows, soft caps, score functions and grouped queries over ranks: the numbers of one rank, bytes and memory."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.chunks import Documents
from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
from tests.helpers.live_storages import LiveStorages
from tests.ranks.parallel.sequence.test_attention import HEADS, PACKED, E, allowed, context_of, tensors

Numbers = list[torch.Tensor]
NAMES = ("output", "query", "key", "value")


def expected(whole: Numbers, mask: torch.Tensor, softcap: float | None = None, bias: Any = 0.0) -> Numbers:
    """The output and three gradients on one rank, in fp64; ``mask`` is broadcast to [B, H, L, L]."""
    query, key, value, gradient = (tensor.double() for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    if softcap is None and isinstance(bias, float):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    else:
        repeats = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(repeats, 1).mT / query.shape[3] ** 0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = (scores + bias).masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1) @ value.repeat_interleave(repeats, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def compare(context: SequenceContext, whole: Numbers, wanted: Numbers, **options: Any) -> None:
    query, key, value, gradient = (context.shard(tensor, 2) for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with sequence_parallel(context):
        out = attention(*leaves, **options)
    found = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    for name, mine, theirs in zip(NAMES, found, wanted, strict=True):
        # A window of 1 leaves no gradient of queries and keys: what is computed is a difference of equal numbers.
        size = theirs.norm() if theirs.norm() > 1 else whole[3].norm().double()
        error = (mine - context.shard(theirs, 2)).norm() / size
        assert error < 1e-6, f"{name}: {error}"


@pytest.mark.parametrize("kind", ["ulysses", "ring", "ring-all_gather", "ring-contiguous", "both"])
@pytest.mark.parametrize("size", [2, 4])
def test_windows_and_soft_caps_over_ranks_have_the_numbers_of_one_rank(kind: str, size: int) -> None:
    """Against plain attention with a mask: windows inside a chunk and longer ones, packed rows, uneven lengths."""
    name, _, option = kind.partition("-")
    given = {"": {}, "all_gather": {"exchange": "all_gather"}, "contiguous": {"order": "contiguous"}}[option]
    cases = []
    for length, is_causal, packed, window in itertools.product((24, 21), (True, False), (True, False), (1, 3, 9)):
        heads, key_heads = HEADS[(length + window + is_causal + 2 * packed) % len(HEADS)]
        softcap = 1.5 if (window == 3) == packed else None
        whole, documents = tensors(heads, key_heads, length), PACKED[length] if packed else None
        wanted = expected(whole, allowed(documents, length, is_causal, window), softcap)
        options = {"is_causal": is_causal, "documents": documents, "window": window, "softcap": softcap}
        cases.append((length, whole, wanted, options))

    def run() -> None:
        for length, whole, wanted, options in cases:
            compare(context_of(name, length=length, **given), whole, wanted, **options)

    run_ranks(size, run)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
def test_windows_and_soft_caps_in_other_dtypes_and_on_one_rank(dtype: torch.dtype, bound: float) -> None:
    whole = tensors(6, 3, 24, dtype)
    for window, softcap in ((5, None), (None, 2.0), (5, 2.0), (99, None)):
        wanted = expected(whole, allowed(None, 24, True, window), softcap)
        leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
        out = attention(*leaves, is_causal=True, window=window, softcap=softcap)
        for mine, theirs in zip([out.detach(), *torch.autograd.grad(out, leaves, whole[3])], wanted, strict=True):
            assert mine.dtype == dtype
            assert (mine - theirs).norm() / theirs.norm() < bound


def test_a_soft_cap_works_with_a_mask_and_with_a_cache_of_keys() -> None:
    whole = tensors(12, 3, 8)
    mask = (torch.rand(2, 12, 8, 8) < 0.5) | torch.eye(8, dtype=torch.bool)
    wanted = expected(whole, mask, 2.0)
    run_ranks(2, lambda: compare(context_of("ulysses"), whole, wanted, mask=mask, softcap=2.0))
    query, key, value, _ = whole
    last = attention(query[:, :, -1:], key, value, softcap=2.0)
    assert torch.allclose(last, attention(query, key, value, is_causal=True, softcap=2.0)[:, :, -1:], atol=1e-6)


def received(order: Any, window: int | None, documents: Documents | None = None) -> list[tuple[str, int]]:
    """What a rank receives in forward and backward, of 64 positions of 2 rows and 2 heads of keys: bytes."""
    context = context_of("ring", order=order)
    query, key, value, gradient = (context.shard(tensor, 2) for tensor in tensors(4, 2, 64))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with current_world().recorder.recording() as entries:
        attention(*leaves, is_causal=True, window=window, documents=documents, context=context).backward(gradient)
    return [(entry.label.removeprefix("attention: keys and values"), entry.nbytes) for entry in entries if entry.nbytes]


POSITION = 2 * 2 * 2 * E * 4  # bytes of one position's keys and values, unrepeated: 2 rows, 2 heads


def test_only_keys_inside_the_window_are_sent() -> None:
    """Of four ranks: contiguous parts need the end of the one before, balanced ones the ends of two chunks."""
    five = 5 * POSITION
    label = [("", five), (" backward", five), (" gradients", five)]
    contiguous = run_ranks(4, received, "contiguous", 6)
    assert contiguous == [
        [(" gradients", five)],
        label,
        label,
        [("", five), (" backward", five)],
    ]
    # Chunks 0 to 7 of 8 positions: rank 1 has 1 and 6, and needs ends of 0 (rank 0) and of 5 (rank 2).
    balanced = run_ranks(4, received, "balanced", 6)
    assert [sum(nbytes for name, nbytes in of if name == "") for of in balanced] == [five, 2 * five, 2 * five, five]
    assert [sum(nbytes for name, nbytes in of if name == " gradients") for of in balanced] == [
        five, 2 * five, 2 * five, five
    ]  # fmt: skip
    whole = [sum(nbytes for name, nbytes in of if name == "") for of in run_ranks(4, received, "balanced", None)]
    assert whole == [3 * 16 * POSITION] * 4  # the ring: all keys, of the other ranks


def test_documents_that_end_at_the_cuts_send_nothing_forward_or_backward() -> None:
    """Nor are empty messages exchanged: the ring takes no step."""
    documents = Documents.of_lengths([[16, 10, 6, 16, 4, 4, 4, 4], [1] * 16 + [8] * 6])

    def num_messages() -> int:
        with current_world().recorder.recording() as entries:
            assert received("contiguous", None, documents) == []
        return len(entries)

    assert run_ranks(4, num_messages) == [0] * 4


def test_rows_of_one_document_are_computed_by_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = tensors(4, 4, 16)
    wanted = attention(query, key, value, is_causal=True)
    monkeypatch.setattr("shoal.parallel.sequence.attention.ring_attention", None)
    found = attention(query, key, value, is_causal=True, documents=Documents.of_lengths([[16], [16]]))
    assert torch.equal(found, wanted)


def test_only_keys_of_documents_that_reach_over_a_cut_are_sent() -> None:
    documents = Documents.of_lengths([[16, 16, 20, 12]])
    assert run_ranks(4, received, "contiguous", None, documents) == [
        [],
        [],
        [(" gradients", 16 * POSITION)],
        [("", 16 * POSITION), (" backward", 16 * POSITION)],
    ]
    with_window = run_ranks(4, received, "contiguous", 3, documents)
    assert with_window[3] == [("", 2 * POSITION), (" backward", 2 * POSITION)]


def peak(kind: str, heads: int, window: int | None) -> tuple[int, int]:
    """The most bytes that forward and backward allocate, beside the inputs."""
    context = context_of(kind)
    shapes = [(1, some, 512, 32) for some in (heads, 1, 1)]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    gradient = torch.randn(shapes[0])
    with LiveStorages() as forward:
        out = attention(*leaves, is_causal=True, window=window, context=context)
        most = forward.peak
    with LiveStorages() as backward:
        torch.autograd.grad(out, leaves, gradient)
    return most, backward.peak


def test_keys_and_values_are_not_repeated_for_the_queries_that_share_them() -> None:
    """16 heads of queries, one of keys: in units of a head of this rank's positions."""
    unit = 4 * 512 * 32
    for forward, backward in run_ranks(2, peak, "ring", 16, None):
        # The output and a tile's with log-sum-exp, two buffers of keys and values. Repeated keys would be 32 more.
        assert forward < (2 * 16 + 4 + 3) * unit
        # Of queries, a tile's; of half the queries what the kernel reads; gradients of keys and values; buffers.
        assert backward < (2 * 16 + 2 * 16 + 12) * unit


def test_over_heads_too_keys_and_values_are_not_repeated() -> None:
    """16 heads of queries and one of keys, which both ranks get: in units of a head of this rank's positions."""
    unit = 4 * 512 * 32
    for forward, backward in run_ranks(2, peak, "ulysses", 16, None):
        # Forward: what attention keeps (queries, keys and values of both ranks, the output) and three buffers of the
        # output on its way back. Repeated keys and values would be 28 more; in backward, with their gradients, 56.
        assert forward < (16 + 4 + 16 + 3 * 16 + 2) * unit
        assert backward < 80 * unit


def test_heads_that_do_not_fit_the_ranks_do_not_repeat_keys() -> None:
    """12 heads in 3 groups on 2 ranks: 4 heads of the first group, 2 of the second; bytes as they are, not repeated."""
    whole = tensors(12, 3, 16)

    def run() -> list[tuple[str, int]]:
        for name in ("ulysses", "both"):
            for documents in (None, Documents.of_lengths([[7, 9]])):
                wanted = expected(whole, allowed(documents, 16, True))
                compare(context_of(name), whole, wanted, is_causal=True, documents=documents)
        context = context_of("both")
        parts = [context.shard(tensor, 2) for tensor in whole[:3]]
        with current_world().recorder.recording() as entries:
            attention(*parts, is_causal=True, context=context)
        return [(entry.op, entry.nbytes) for entry in entries if entry.nbytes]

    head = 2 * 4 * E * 4  # bytes of 4 positions of a head
    calls = run_ranks(4, run)
    # Ranks of sp get 6 heads of queries and 2 of keys and of values; the ring sends 2 heads of 8 positions.
    ring = 2 * 2 * 2 * head
    assert [sorted(of) for of in calls] == [[("all_to_all", 6 * head), ("all_to_all", 10 * head), ("recv", ring)]] * 4


# score_mod and block_mask


def alibi(score: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
    return score - 2.0 ** -(head + 1) * (query - key).abs()


def test_score_functions_and_block_masks_see_the_heads_of_the_whole_model() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.tensor([[0] * 5 + [1] * 19, [0] * 12 + [1] * 12])

    def own_documents(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (documents[row][query] == documents[row, key]) & (query >= key) & (key >= query - 3 * (head + 1))

    position = torch.arange(24)
    distance = position[:, None] - position
    bias = -(2.0 ** -(torch.arange(12.0).view(12, 1, 1) + 1)) * distance.abs()
    mask = (documents[:, None, :, None] == documents[:, None, None]) & (distance >= 0)
    for heads, key_heads in ((12, 3), (4, 4)):
        reach = (torch.arange(heads).view(heads, 1, 1) + 1) * 3
        whole = tensors(heads, key_heads, 24)
        wanted = expected(whole, mask & (distance <= reach), bias=bias[:heads].double())
        blocks = create_block_mask(own_documents, 2, heads, 24, 24, device="cpu", BLOCK_SIZE=8)
        of_one = [attention(*whole[:3], score_mod=alibi, block_mask=some) for some in (own_documents, blocks)]
        assert all(torch.allclose(out.double(), wanted[0], atol=1e-6) for out in of_one)

        def run(whole: Numbers = whole, wanted: Numbers = wanted, blocks: Any = blocks) -> None:
            for block_mask in (own_documents, blocks):
                compare(context_of("ulysses"), whole, wanted, score_mod=alibi, block_mask=block_mask)

        run_ranks(2, run)


def test_a_score_functions_own_tensors_get_gradients_of_this_ranks_heads() -> None:
    whole = tensors(4, 2, 8)
    bias = torch.randn(4, 8, 8)

    def gradients(context: SequenceContext | None) -> torch.Tensor:
        own = bias.clone().requires_grad_()
        parts = [tensor if context is None else context.shard(tensor, 2) for tensor in whole]
        out = attention(*parts[:3], score_mod=lambda s, b, h, q, k: s + own[h, q, k], context=context)
        (found,) = torch.autograd.grad(out, own, parts[3])
        return found

    wanted = gradients(None)
    first, second = run_ranks(2, lambda: gradients(context_of("ulysses")))
    assert torch.allclose(torch.cat([first[:2], second[2:]]), wanted, atol=1e-6)
    assert not first[2:].any()


def test_queries_that_a_block_mask_leaves_without_keys_get_zeros() -> None:
    whole = [tensor.requires_grad_() for tensor in tensors(2, 2, 6)[:3]]
    out = attention(*whole, block_mask=lambda b, h, q, k: (q >= 2) & (k < 4))
    assert not out[:, :, :2].any()
    out.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in whole)


def test_torchs_flex_attention_computes_what_the_plain_path_does() -> None:
    """Its forward, which it has on CPU."""
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, value, _ = tensors(4, 2, 16)
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
    wanted, *_ = flex_attention(query, key, value, alibi, blocks.as_tuple(), 0.3, {"BACKEND": "AUTO"})
    assert torch.allclose(
        attention(query, key, value, score_mod=alibi, block_mask=blocks, scale=0.3), wanted, atol=1e-6
    )


def test_what_an_axis_does_not_have_is_refused_by_name_before_any_collective_and_memory() -> None:
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("ring", {"score_mod": alibi}, r"cp=2 was given a score_mod(.|\n)*use sp alone for it"),
        ("ring", {"block_mask": lambda b, h, q, k: q >= k}, r"cp=2 was given a block_mask: ring"),
        ("ulysses", {"score_mod": alibi, "is_causal": True, "softcap": 1.0}, "score_mod beside is_causal, softcap"),
        ("ulysses", {"mask": torch.ones(12, 12), "window": 3}, r"mask of shape \(12, 12\) beside window"),
        ("ulysses", {"window": 0}, "window=0(.|\n)*above 0"),
        ("ring", {"softcap": -1.0}, "softcap=-1.0"),
    ]

    def run() -> None:
        query = torch.zeros(1, 4, 6, E)
        for kind, options, match in refusals:
            context = context_of(kind)
            with current_world().recorder.recording() as entries, LiveStorages() as live:
                with pytest.raises(UsageError, match=match):
                    attention(query, query, query, context=context, **options)
            assert (entries, live.peak) == ([], 0)

    run_ranks(2, run)
    query = torch.zeros(1, 4, 6, E)
    with pytest.raises(UsageError, match=re.escape("with window was asked for dropout of 0.1")):
        attention(query, query, query, window=3, dropout_p=0.1)
