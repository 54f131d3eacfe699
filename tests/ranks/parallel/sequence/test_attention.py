"""Attention over ranks that hold parts of a sequence: the numbers of one rank, the collectives, and the memory."""

from __future__ import annotations

import itertools
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.mesh import Mesh
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.chunks import Documents, chunks_of
from shoal.parallel.sequence.context import SequenceContext, sequence_parallel
from shoal.parallel.sequence.ring import RingPlan, direct_blocks
from tests.helpers.live_storages import LiveStorages
from tests.helpers.places import ROOT
from tests.ranks.comm.test_processes import own_world

Contexts = Callable[[], tuple[Any, Any]]

E = 8
HEADS = [(8, 8), (7, 7), (6, 3), (4, 1)]  # of queries, and of keys and values


def context_of(kind: str, **options: Any) -> SequenceContext:
    """``ulysses``, ``ring``, or ``both`` on half the ranks each."""
    world = current_world()
    if kind == "both":
        mesh = Mesh(dp_shard=2, sp=world.size // 2)
        return SequenceContext(sp=world.communicator("sp", mesh), cp=world.communicator("dp_shard", mesh), **options)
    comm = world.communicator("dp", Mesh.of(world.size))
    return SequenceContext(**({"sp": comm} if kind == "ulysses" else {"cp": comm}), **options)


def tensors(heads: int, key_heads: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(heads + length)
    return [
        torch.randn(2, some, length, E, generator=generator, dtype=dtype)
        for some in (heads, key_heads, key_heads, heads)
    ]


def allowed(documents: Documents | None, length: int, is_causal: bool, window: int | None = None) -> torch.Tensor:
    """[2, 1, L, L]: may a position attend to another?"""
    position = torch.arange(length)
    distance = position[:, None] - position
    causal = (distance.abs() < (window or length)) & ((distance >= 0) | (not is_causal))
    if documents is None:
        return causal.expand(2, 1, length, length)
    begins = [torch.tensor(row) for row in documents.begins * (2 // len(documents.begins))]
    ids = torch.stack([torch.searchsorted(row, position, right=True) for row in begins])
    return (causal & (ids[:, :, None] == ids[:, None, :])).unsqueeze(1)


def expected(whole: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """The output and three gradients on one rank, in fp64."""
    query, key, value, gradient = (tensor.double() for tensor in whole)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def check(
    context: SequenceContext, heads: int, key_heads: int, length: int, stretched: str = "", **options: Any
) -> None:
    """
    Args:
        stretched: of "query", "key", "value" and "gradient" those whose heads have their elements apart in memory.
    """
    whole = tensors(heads, key_heads, length)
    mask = allowed(options.get("documents"), length, options.get("is_causal", False), options.get("window"))
    wanted = expected(whole, mask)
    shard = partial(context.shard, dim=2, documents=options.get("documents"))
    query, key, value, gradient = (
        shard(tensor).mT.contiguous().mT if name in stretched else shard(tensor)
        for name, tensor in zip(("query", "key", "value", "gradient"), whole, strict=True)
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with sequence_parallel(context):
        out = attention(*leaves, **options)
    found = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    for name, mine, theirs in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        assert mine.dtype == torch.float32
        error = (mine - shard(theirs)).norm() / theirs.norm()
        assert error < 1e-6, f"{name}: {error}"


PACKED = {24: Documents.of_lengths([[5, 1, 11, 7], [12, 12]]), 21: Documents.of_lengths([[3, 18], [2, 2, 8, 9]])}


@pytest.mark.parametrize("kind", ["ulysses", "ring", "ring-all_gather", "ring-contiguous", "both"])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_ranks_has_the_output_and_gradients_of_one_rank(kind: str, size: int) -> None:
    """Heads that do not divide, grouped queries, packed documents, and lengths that do not divide."""
    name, _, option = kind.partition("-")
    options = {"": {}, "all_gather": {"exchange": "all_gather"}, "contiguous": {"order": "contiguous"}}[option]

    def run() -> None:
        for length, is_causal, packed in itertools.product((24, 21), (True, False), (True, False)):
            context = context_of(name, length=length, **options)
            for heads, key_heads in HEADS if option == "" else HEADS[2:3]:
                documents = PACKED[length] if packed else None
                check(context, heads, key_heads, length, is_causal=is_causal, documents=documents)

    run_ranks(size, run)


@pytest.mark.parametrize("most_at_once", [0, 8])
@pytest.mark.parametrize("kind", ["ulysses", "ring", "ring-all_gather", "both"])
def test_ranks_that_divide_rows_by_their_documents_have_the_attention_of_one(
    kind: str, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sends of all steps at the same time, or of two; with windows, whose documents may be cut again by padding."""
    monkeypatch.setattr("shoal.parallel.sequence.ring._MOST_AT_ONCE", most_at_once)
    name, _, exchange = kind.partition("-")

    def run() -> None:
        for (length, packed), is_causal in itertools.product(PACKED.items(), (True, False)):
            documents = packed.balanced()
            context = context_of(name, length=length, **({"exchange": exchange} if exchange else {}))
            check(context, 4, 2, length, is_causal=is_causal, documents=documents)
            check(context, 4, 2, length, is_causal=is_causal, documents=documents, window=4)
            shorter = documents.and_of(Documents.of_lengths([[length - 3, 3]]))
            check(context, 4, 2, length, is_causal=is_causal, documents=shorter)
            whole = torch.arange(2 * length).view(2, length)
            mine = context.shard(whole, documents=documents)
            assert torch.equal(context.unshard(mine), whole)
            assert torch.equal(context.unshard(mine.clone(), documents=documents), whole)

    run_ranks(4, run)


@pytest.mark.parametrize(("most_at_once", "share_before"), [(8, 1.0), (5, 2 / 3)])
def test_what_is_sent_for_documents_is_under_way_before_the_first_step_if_it_is_little(
    most_at_once: int, share_before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 4 ranks needs at most 3 parts of one document, and sends its own 3 times: 6 parts in 3 steps."""
    monkeypatch.setattr("shoal.parallel.sequence.ring._MOST_AT_ONCE", most_at_once)

    def run() -> float:
        comm = context_of("ring").cp
        assert comm is not None
        plan = RingPlan(comm, chunks_of(40, 4, "balanced"), True, ((0, 40),), 1.0, "ring", "attention")
        key = torch.ones(1, 1, 10, E)
        with current_world().recorder.recording() as entries:
            blocks = direct_blocks(key, key, plan, comm, "keys")
            next(blocks)
            num_before = len(entries)
            assert len(list(blocks)) == 3
        return num_before / len(entries)

    assert run_ranks(4, run) == [share_before] * 4


def test_documents_by_which_rows_are_divided_are_known_of_positions_of_copies_and_with_padding() -> None:
    def run() -> None:
        context = context_of("ring")
        documents = Documents.of_lengths([[7, 1, 8], [3, 3, 10]]).balanced()
        whole = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([7, 1, 8], [3, 3, 10])])
        assert context.chunks(16, documents) != context.chunks(16)
        context.shard(torch.arange(16)[None], documents=Documents.of_lengths([[5, 11]]).balanced())
        positions = context.shard(whole, documents=documents)
        with current_world().recorder.recording() as entries:
            assert context.documents_of(positions, None) == documents
        assert not entries
        assert context.documents_of(positions.clone(), None) == documents
        is_token = context.shard(torch.arange(16).expand(2, 16) < 14, documents=documents)
        padded = documents.and_of(Documents.of_lengths([[14, 2]]))
        assert context.documents_of(positions, is_token) == context.documents_of(positions.clone(), is_token) == padded
        ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in ([7, 1, 8], [3, 3, 10])])
        assert context.documents(context.shard(ids, documents=documents)) == documents
        assert context.documents_of(context.shard(whole).clone(), None) == Documents(documents.begins)
        others = [Documents.of_lengths([[length, 16 - length]]).balanced() for length in (5, 9)]
        for number in range(64):  # batches, until the first is not known any more
            context.shard(whole, documents=others[number % 2])
        with pytest.raises(UsageError, match="not those of a batch that ranks of cp have divided"):
            context.documents_of(positions.clone(), None)

    run_ranks(4, run)


def test_attention_without_the_documents_by_which_the_batch_was_divided_is_an_error() -> None:
    def run() -> None:
        context = context_of("ring")
        documents = Documents.of_lengths([[7, 1, 8]])
        query, key, value, _ = (context.shard(each, 2, documents.balanced()) for each in tensors(4, 4, 16))
        for unbalanced in (None, documents):
            with pytest.raises(UsageError, match="divided by its documents") as raised:
                attention(query, key, value, is_causal=True, documents=unbalanced, context=context)
            assert raised.value.code == "sequence-documents"
        attention(query, key, value, is_causal=True, documents=documents.balanced(), context=context)
        with pytest.raises(UsageError, match="16 positions, with documents of 8"):
            context.shard(torch.ones(1, 16), documents=Documents.of_lengths([[8]]))
        query, key, value, _ = (context.shard(each, 2) for each in tensors(4, 4, 16))
        attention(query, key, value, is_causal=True, context=context)

    run_ranks(4, run)


@pytest.mark.parametrize("stretched", ["query", "key", "value", "gradient", "query key value gradient"])
@pytest.mark.parametrize("kind", ["ulysses", "ring", "ring-all_gather", "both"])
def test_heads_whose_elements_lie_apart_in_memory_have_the_attention_of_dense_ones(kind: str, stretched: str) -> None:
    """torch's CPU kernel reads other elements then, and says nothing."""
    name, _, exchange = kind.partition("-")
    options = {"exchange": exchange} if exchange else {}

    def run() -> None:
        for packed in (None, PACKED[24]):
            context = context_of(name, length=24, **options)
            check(context, 6, 3, 24, stretched, is_causal=True, documents=packed)

    run_ranks(4, run)


def test_heads_of_keys_that_fit_no_ranks_queries_are_repeated() -> None:
    """12 heads in 3 groups on 2 ranks: the first rank has the first group, and half of the second."""
    run_ranks(2, lambda: check(context_of("ulysses"), 12, 3, 8, is_causal=True))


def test_a_document_for_each_row_or_one_for_all_as_numbers_of_this_ranks_positions() -> None:
    def run() -> None:
        ids = torch.tensor([0] * 5 + [3] + [1] * 11 + [3] * 7).expand(2, 24)
        for kind in ("both", "ring"):
            context = context_of(kind)
            query, key, value, _ = (context.shard(tensor, 2) for tensor in tensors(4, 4, 24))
            documents = Documents.of_lengths([[5, 1, 11, 7]])
            with current_world().recorder.recording() as entries:
                got = attention(query, key, value, is_causal=True, documents=documents, context=context)
            assert [entry.label for entry in entries if "gather" in entry.label] == []
            again = attention(query, key, value, is_causal=True, documents=context.shard(ids), context=context)
            assert torch.equal(got, again)

    run_ranks(4, run)


def test_documents_of_positions_are_exchanged_once_for_a_batch() -> None:
    def run() -> None:
        context = context_of("ring")
        positions = context.positions(16).clone()[None]
        with current_world().recorder.recording() as entries:
            assert context.documents_of(positions, None) is None
            first = len(entries)
            assert context.documents_of(positions, None) is None
            assert len(entries) == first > 0
            positions[positions >= 6] -= 6
            found = context.documents_of(positions, None)
            assert len(entries) == 2 * first
        assert found == Documents.of_lengths([[6, 10]])

    run_ranks(2, run)


def recomputed_in_turn(policy: Contexts | None) -> tuple[torch.Tensor, int, int]:
    """Two batches forward, then backward. Returns: a weight's gradient; gathers in forward, and in backward."""
    context = context_of("both")
    weight = torch.linspace(-1.0, 1.0, 64).view(8, 8).requires_grad_()

    def block(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        heads = hidden @ weight
        first = attention(heads, heads, heads, is_causal=True, documents=ids, context=context)
        return attention(first, heads, heads, is_causal=True, documents=ids, context=context)

    with current_world().recorder.recording() as entries:
        outputs = []
        for begin in (3, 7):
            hidden = context.shard(torch.linspace(-1.0, begin, 1024).sin().view(2, 4, 16, 8), 2)
            ids = context.shard((torch.arange(16) >= begin).long().expand(2, 16))
            run = block if policy is None else partial(checkpoint, block, use_reentrant=False, context_fn=policy)
            outputs.append(run(hidden, ids))
        forward = len([entry for entry in entries if "gather" in entry.label])
        for output in outputs:
            output.square().sum().backward()
        both = len([entry for entry in entries if "gather" in entry.label])
    assert weight.grad is not None
    return weight.grad, forward, both - forward


@pytest.mark.parametrize("saved", [torch.ops.aten.mm.default, torch.ops.aten.ne.Tensor])
def test_a_recomputation_takes_the_documents_of_its_forward_when_those_of_another_batch_are_kept(saved: Any) -> None:
    policy = partial(create_selective_checkpoint_contexts, [saved])
    expected = run_ranks(4, lambda: recomputed_in_turn(None))
    found = run_ranks(4, lambda: recomputed_in_turn(policy))
    for (gradient, in_forward, _), (again, in_forward_too, in_backward) in zip(expected, found, strict=True):
        assert torch.equal(again, gradient)
        assert in_forward == in_forward_too > 0
        assert in_backward == 0


def plain_check(dtype: torch.dtype, bound: float) -> None:
    """Heads of values that are smaller than those of keys, as in multi-head latent attention: the plain kernel."""
    context = context_of("both")
    query, key, value, gradient = tensors(4, 2, 16, dtype)
    whole = [query, key, value[..., :3], gradient[..., :3]]
    wanted = expected(whole, allowed(None, 16, True))
    leaves = [context.shard(tensor, 2).requires_grad_() for tensor in whole[:3]]
    out = attention(*leaves, is_causal=True, context=context)
    found = [out.detach(), *torch.autograd.grad(out, leaves, context.shard(whole[3], 2))]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine - context.shard(theirs, 2)).norm() / theirs.norm() < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
def test_values_may_have_another_head_size(dtype: torch.dtype, bound: float) -> None:
    run_ranks(4, plain_check, dtype, bound)


def test_autocast_gives_attention_in_its_dtype() -> None:
    def run() -> None:
        context = context_of("ring")
        query, key, value, _ = (context.shard(tensor, 2).requires_grad_() for tensor in tensors(4, 2, 16))
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(query, key, value.to(torch.bfloat16), is_causal=True, context=context)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert query.grad is not None
        assert query.grad.dtype == torch.float32

    run_ranks(2, run)


def over_processes(rank: int, size: int, shared_memory: bool) -> None:
    world = own_world(rank, size, "sequence", shared_memory)
    comm = world.communicator("dp", Mesh.of(size))
    for context in (SequenceContext(sp=comm, length=21), SequenceContext(cp=comm, length=21)):
        check(context, 7, 7, 21, is_causal=True)
        check(context, 4, 1, 21, is_causal=True, documents=PACKED[21])
        check(context, 7, 7, 21, is_causal=True, window=4)
    world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_attention_over_processes(gloo: Callable[..., list[Any]], shared_memory: bool) -> None:
    gloo(2, over_processes, shared_memory)


def calls_of(kind: str, exchange: Any = "ring") -> list[tuple[str, str, int]]:
    """What forward and backward of one attention issue: operation, label, bytes received."""
    context = context_of(kind, exchange=exchange)
    query, key, value, gradient = (context.shard(tensor, 2) for tensor in tensors(8, 4, 32))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with current_world().recorder.recording() as entries:
        attention(*leaves, is_causal=True, context=context).backward(gradient)
    return [(entry.op, entry.label, entry.nbytes) for entry in entries]


def test_ulysses_issues_two_all_to_alls_in_forward_and_two_in_backward() -> None:
    """The bytes of the paper's four: of queries, keys and values in one, and of the output."""
    head = 4 * 2 * 8 * E  # bytes of 8 positions of a head
    qkv, out = 3 * (2 + 1 + 1) * head, 3 * 2 * head
    assert (
        run_ranks(4, calls_of, "ulysses")
        == [
            [
                ("all_to_all", "attention: heads", qkv),
                ("all_to_all", "attention: positions", out),
                ("all_to_all", "attention: positions backward", out),
                ("all_to_all", "attention: heads backward", qkv),
            ]
        ]
        * 4
    )


def test_ring_attention_sends_keys_and_values_one_time_less_than_there_are_ranks() -> None:
    label = "attention: keys and values"
    nbytes = 4 * 2 * (4 + 4) * 8 * E  # of one rank's keys and values
    forward = [("send", label, 0), ("recv", label, nbytes)]
    keys = [("send", f"{label} backward", 0), ("recv", f"{label} backward", nbytes)]
    gradients = [("send", f"{label} gradients", 0), ("recv", f"{label} gradients", nbytes)]
    expected_calls = [*forward * 3, *keys, *keys, *gradients, *keys, *gradients, *gradients]
    assert run_ranks(4, calls_of, "ring") == [expected_calls] * 4


def test_all_gather_attention_issues_one_all_gather_a_pass_and_one_reduce_scatter() -> None:
    label = "attention: keys and values"
    nbytes = 3 * 4 * 2 * (4 + 4) * 8 * E
    assert (
        run_ranks(4, calls_of, "ring", "all_gather")
        == [
            [
                ("all_gather", label, nbytes),
                ("all_gather", f"{label} backward", nbytes),
                ("reduce_scatter", f"{label} gradients", nbytes),
            ]
        ]
        * 4
    )


def peak_bytes(length: int, exchange: str) -> tuple[int, int]:
    """The most bytes that forward and backward allocate, beside the inputs."""
    context = context_of("ring", exchange=exchange)
    leaves = [torch.randn(1, 4, length // 4, 32).requires_grad_() for _ in range(3)]
    gradient = torch.randn(1, 4, length // 4, 32)
    with LiveStorages() as forward:
        out = attention(*leaves, is_causal=True, context=context)
        peak = forward.peak
    with LiveStorages() as backward:
        torch.autograd.grad(out, leaves, gradient)
    return peak, backward.peak


def test_ring_attention_holds_three_blocks_of_keys_and_values_and_no_scores() -> None:
    """In units of one rank's queries. Forward: the output, a tile's, three buffers of keys and values. Backward: three
    buffers; gradients of keys and values four times (its own, received, sent, computed); of queries; a tile's.
    """
    unit = 4 * 4 * 1024 // 4 * 32
    for forward, backward in run_ranks(4, peak_bytes, 1024, "ring"):
        assert forward < 8.5 * unit
        assert backward < 20.5 * unit
    longer = run_ranks(4, peak_bytes, 2048, "ring")
    assert max(longer) < (2 * 8.5 * unit, 2 * 20.5 * unit)  # in proportion to the positions: no scores
    gathered = run_ranks(4, peak_bytes, 2048, "all_gather")
    assert min(gathered)[0] > max(longer)[0] + 2 * 3 * unit  # the keys and values of four ranks and its own


def refusals(kind: str, match: str, query: torch.Tensor, key: torch.Tensor, **options: Any) -> None:
    context = context_of(kind, length=options.pop("length", None))
    with current_world().recorder.recording() as entries, pytest.raises(UsageError, match=match):
        attention(query, key, key, context=context, **options)
    assert entries == []


def test_what_attention_over_ranks_cannot_do_is_refused_before_any_collective() -> None:
    def run() -> None:
        four = torch.zeros(1, 4, 6, E)
        refusals("ring", r"was given a mask of shape \(12, 12\): ring", four, four, mask=torch.ones(12, 12))
        refusals("ulysses", r"shape \(6, 6\)(.|\n)*\[.., 12, 12\]", four, four, mask=torch.ones(6, 6))
        refusals("ulysses", r"dropout of 0.1", four, four, dropout_p=0.1)
        refusals("ring", r"7 positions on each of 2 ranks, 14 (.|\n)*pad the sequence by 2 positions to 16",
                 torch.zeros(1, 4, 7, E), torch.zeros(1, 4, 7, E))  # fmt: skip
        refusals(
            "ulysses",
            r"1 attention heads cannot be spread over 2 ranks(.|\n)*use sp=1 or less",
            four[:, :1],
            four[:, :1],
        )
        refusals("ulysses", r"4 heads of queries cannot share 3 heads", four, four[:, :3])
        refusals("ring", r"query of shape .1, 4, 1, 8., keys of", four[:, :, :1], four)
        documents = Documents.of_lengths([[6]])
        refusals("ring", r"1 rows of 6 positions, for 1 rows of 12", four, four, documents=documents)
        refusals("ring", r"6 positions on this rank, whose part of 16 positions are 8", four, four, length=16)
        with pytest.raises(UsageError, match=r"13 positions does not divide into 4 parts(.|\n)*pad it by 3 positions"):
            context_of("ring").shard(torch.zeros(1, 13))

    run_ranks(2, run)


def test_a_mask_of_the_whole_sequence_works_over_heads() -> None:
    bias = torch.randn(1, 4, 8, 8)

    def run() -> None:
        context = context_of("ulysses")
        query, key, value, _ = tensors(4, 2, 8)
        wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
        parts = (context.shard(tensor, 2) for tensor in (query, key, value))
        got = attention(*parts, mask=bias, context=context)
        assert torch.allclose(got, context.shard(wanted, 2), atol=1e-6)

    run_ranks(2, run)


def test_without_a_context_attention_is_torchs() -> None:
    query, key, value, _ = tensors(4, 2, 8)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(query, key, value, is_causal=True), wanted)
    packed = attention(query, key, value, is_causal=True, documents=Documents.of_lengths([[3, 5], [8]]))
    assert torch.allclose(packed[1], wanted[1], atol=1e-6)
    assert torch.allclose(packed[0, :, :3], wanted[0, :, :3], atol=1e-6)
    assert not torch.allclose(packed[0, :, 4:], wanted[0, :, 4:], atol=1e-2)


def test_parts_of_a_sequence_are_put_together_again() -> None:
    def run() -> None:
        whole = torch.arange(2 * 23).view(2, 23)
        for kind in ("ulysses", "ring", "both"):
            context = context_of(kind, length=23)
            assert torch.equal(context.unshard(context.shard(whole)), whole)
            assert torch.equal(context.shard(whole)[0], context.positions(23))

    run_ranks(4, run)


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "concepts" / "sequence-parallelism.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "example.py").write_text(program)
    runpy.run_path(str(tmp_path / "example.py"))
