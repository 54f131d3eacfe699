"""Tiles cover the allowed scores once; documents are read from every form; a kernel's tiles give the whole."""

from __future__ import annotations

import doctest
import importlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.comm.fake import FakeCommunicator
from shoal.comm.protocol import Communicator
from shoal.comm.recorder import Recorder
from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import (
    Chunks,
    Documents,
    Tile,
    chunks_of,
    keys_of,
    most_exchanged,
    num_positions,
    of_packed_keys,
    tiles_of,
)
from shoal.parallel.sequence.kernels import (
    AttentionKernel,
    CpuKernel,
    EfficientKernel,
    FlashKernel,
    PlainKernel,
    UnevenGroups,
    kernel_for,
)
from shoal.parallel.sequence.ulysses import HeadExchange, split_heads


@pytest.mark.parametrize("module", ["chunks", "ulysses"])
def test_the_examples_hold(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"shoal.parallel.sequence.{module}"))
    assert (results.failed, results.attempted > 0) == (0, True)


class Copies(TorchDispatchMode):
    """Counts copies, which are one kernel each on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.copy_.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("heads", "key_heads", "to_heads", "to_positions"),
    [
        (16, 8, 3 + 3, 1 + 1),
        (8, 2, (1 + 8 + 8) + 3, 1 + 1),  # four ranks get the same head of keys
        (9, 9, 3 * 8 + 3, 1 + 8),  # this rank has two heads, the others one
    ],
)
def test_equal_parts_of_ranks_are_copied_as_one(heads: int, key_heads: int, to_heads: int, to_positions: int) -> None:
    comm = Communicator(FakeCommunicator("sp", 0, 8), Recorder())
    split = split_heads(heads, key_heads, 8)
    exchange = HeadExchange(comm, (4,) * 8)
    query, key = torch.ones(2, heads, 4, 3), torch.ones(2, key_heads, 4, 3)
    with Copies() as copies:
        moved = exchange.to_heads((query, key, key), (split.queries, split.keys, split.keys), "heads")
    assert copies.number == to_heads + 1  # this rank's part, by the communicator
    with Copies() as copies:
        assert exchange.to_positions(moved[0], split.queries, "positions").shape == query.shape
    assert copies.number == to_positions + 1


def positions(chunks: Chunks) -> list[int]:
    return [position for chunk in chunks for position in chunk]


def scores_of(tile: Tile) -> Iterator[tuple[int, int]]:
    """The queries and keys of a tile that attend."""
    queries, keys = ((stop - start) // tile.num_blocks for start, stop in ((tile.q0, tile.q1), (tile.k0, tile.k1)))
    assert (queries == keys) or not tile.is_causal
    for block, q, k in itertools.product(range(tile.num_blocks), range(queries), range(keys)):
        if not tile.is_causal or (k >= q if tile.is_reversed else k <= q):
            yield tile.q0 + block * queries + q, tile.k0 + block * keys + k


def test_tiles_cover_every_allowed_score_once() -> None:
    draw = random.Random(0)
    for length, ranks, order, is_causal, window in itertools.product(
        (5, 12, 17), (1, 2, 3, 4), ("balanced", "contiguous"), (0, 1), (None, 1, 2, 3, 5, 11, 30)
    ):
        begins = tuple(sorted({0, length, *draw.sample(range(1, length), draw.randrange(4))}))
        document = {position: sum(begin <= position for begin in begins) for position in range(length)}
        by_documents = (begins,) if draw.randrange(2) else None
        chunks = chunks_of(length, ranks, order, by_documents)
        assert [num_positions(each) for each in chunks] == [num_positions(e) for e in chunks_of(length, ranks, order)]
        assert sorted(position for each in chunks for position in positions(each)) == list(range(length))
        for documents in (None, (begins,)):
            covered: Counter[tuple[int, int]] = Counter()
            packed: Counter[tuple[int, int]] = Counter()
            for queries, keys in itertools.product(chunks, repeat=2):
                at, to = positions(queries), positions(keys)
                tiles = tiles_of(queries, keys, bool(is_causal), documents, window)
                covered.update((at[q], to[k]) for tile in tiles for q, k in scores_of(tile))
                needed = [to[place] for some in keys_of(tiles) for place in some]
                packed.update((at[q], needed[k]) for tile in of_packed_keys(tiles) for q, k in scores_of(tile))
            assert packed == covered
            assert covered == {
                (q, k): 1
                for q, k in itertools.product(range(length), repeat=2)
                if (not is_causal or k <= q)
                and (documents is None or document[q] == document[k])
                and (window is None or abs(q - k) < window)
            }


def test_a_window_makes_few_tiles_whatever_the_length() -> None:
    (chunks,) = chunks_of(100_000, 1, "contiguous")
    tiles = tiles_of(chunks, chunks, True, None, 64)
    assert [str(tile) for tile in tiles] == [
        "[q 0:63, k 0:63, causal]",
        "[q 63:99981, k 63:99981, causal, 1586 blocks]",
        "[q 63:99981, k 0:99918, reversed, 1586 blocks]",
        "[q 99981:100000, k 99981:100000, causal]",
        "[q 99981:100000, k 99918:99937, reversed]",
        "[q 99981:100000, k 99937:99981]",
    ]


def test_balanced_chunks_give_every_rank_the_same_number_of_causal_scores() -> None:
    def scores(chunks: tuple[Chunks, ...], rank: int) -> int:
        tiles = [tile for keys in chunks for tile in tiles_of(chunks[rank], keys, True, None)]
        sizes = [(tile.q1 - tile.q0, tile.k1 - tile.k0, tile.is_causal) for tile in tiles]
        return sum(q * (q + 1) // 2 if is_causal else q * k for q, k, is_causal in sizes)

    balanced, contiguous = (chunks_of(64, 4, order) for order in ("balanced", "contiguous"))
    assert [scores(balanced, rank) for rank in range(4)] == [520] * 4
    assert [scores(contiguous, rank) for rank in range(4)] == [136, 392, 648, 904]


def test_chunks_of_documents_are_few_and_of_equal_work_whatever_the_documents() -> None:
    draw = random.Random(0)
    for length, ranks in ((4096, 2), (4099, 3), (4096, 8), (1 << 18, 16)):
        rows = [sorted({0, length, *draw.choices(range(1, length), k=draw.randrange(30))}) for _ in range(2)]
        chunks = chunks_of(length, ranks, "balanced", tuple(map(tuple, rows)))
        assert sum(map(len, chunks)) < 2 * ranks
        assert all(one.stop < other.start for each in chunks for one, other in itertools.pairwise(each))
        firsts = [max(begin for begin in row if begin <= at) for row in rows for at in range(length)]
        keys = [position % length - first + 1 for position, first in enumerate(firsts)]
        work = [sum(keys[at] + keys[length + at] for at in positions(each)) for each in chunks]
        assert max(work) / (sum(work) / ranks) < 1.002


def test_no_rank_exchanges_more_positions_than_its_documents_have() -> None:
    draw = random.Random(0)
    for ranks, is_causal, number in itertools.product((2, 3, 5), (True, False), range(4)):
        begins = tuple(sorted({0, 60, *draw.choices(range(1, 60), k=number)}))
        chunks = chunks_of(60, ranks, "balanced", (begins,))
        exchanged = [0] * ranks
        for one, other in itertools.permutations(range(ranks), 2):
            num_keys = sum(map(len, keys_of(tiles_of(chunks[one], chunks[other], is_causal, (begins,)))))
            exchanged[one] += num_keys
            exchanged[other] += num_keys
        most = most_exchanged(chunks, (begins,), is_causal)
        assert max(exchanged) <= most if is_causal else max(exchanged) == most


def test_rows_with_documents_of_their_own_get_tiles_of_their_own() -> None:
    (chunks,) = chunks_of(6, 1, "balanced")
    tiles = tiles_of(chunks, chunks, True, ((0, 2, 6), (0, 6)))
    assert [(tile.row, tile.q0, tile.q1) for tile in tiles] == [(0, 0, 2), (0, 2, 6), (1, 0, 6)]
    assert [tile.row for tile in tiles_of(chunks, chunks, True, ((0, 2, 6), (0, 2, 6)))] == [None, None]


def test_documents_from_every_form() -> None:
    wanted = Documents(((0, 3, 4, 9),))
    assert Documents.of_lengths([[3, 1, 0, 5]]) == wanted
    assert Documents.from_cu_seqlens(torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)) == wanted
    assert Documents.from_ids(torch.tensor([1, 1, 1, 0, 5, 5, 5, 5, 5])) == wanted
    assert Documents.from_positions(torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])) == wanted
    both = wanted.and_of(Documents(((0, 9), (0, 5, 9))))
    assert both.begins == ((0, 3, 4, 9), (0, 3, 4, 5, 9))
    padding = Documents.of_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool())
    assert padding.begins == ((0, 2, 4), (0, 4))
    with pytest.raises(UsageError, match="padding between tokens"):
        Documents.of_padding(torch.tensor([[1, 0, 1, 1]]).bool())
    with pytest.raises(UsageError, match=r"have \[5, 9\] positions together"):
        Documents.of_lengths([[4, 5], [5]])


UNEVEN = ((range(4), range(1)), (range(4, 6), range(1, 2)))
KERNELS: list[tuple[AttentionKernel, int, float | None]] = [
    (CpuKernel(), 6, None),
    (CpuKernel(), 2, None),
    (PlainKernel(), 6, None),
    (PlainKernel(), 2, None),
    (PlainKernel(0.5), 1, 0.5),
    (UnevenGroups(CpuKernel(), UNEVEN), 2, None),
    (UnevenGroups(PlainKernel(0.5), UNEVEN), 2, 0.5),
]


@pytest.mark.parametrize(("kernel", "key_heads", "softcap"), KERNELS)
def test_a_kernel_gives_log_sum_exp_and_the_gradients_of_one_tile(
    kernel: AttentionKernel, key_heads: int, softcap: float | None
) -> None:
    """Heads of queries share those of keys evenly, or four the first and two the second."""
    query, key, value, gradient = (
        torch.randn(2, heads, 6, 8, dtype=torch.float64) for heads in (6, key_heads, key_heads, 6)
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    of_query = [0, 0, 0, 0, 1, 1] if isinstance(kernel, UnevenGroups) else [head * key_heads // 6 for head in range(6)]
    for is_causal in (False, True):
        scores = query @ key[:, of_query].mT * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        wanted = scores.softmax(-1) @ value[:, of_query]
        with torch.no_grad():
            out, lse = kernel.forward(query, key, value, is_causal, 0.3)
            shares = kernel.backward(gradient, (query, key, value, out, lse), is_causal, 0.3)
        assert torch.allclose(out, wanted)
        assert torch.allclose(lse, scores.logsumexp(-1))
        for share, expected in zip(shares, torch.autograd.grad(wanted, leaves, gradient), strict=True):
            assert torch.allclose(share, expected)


def test_the_efficient_kernel_is_called_with_as_many_heads_of_keys_as_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch has it on CUDA: here the CPU's computes in its place, with the efficient one's padded log-sum-exp."""

    class Efficient:
        def _scaled_dot_product_efficient_attention(
            self,
            query: Any,
            key: Any,
            value: Any,
            bias: None,
            has_lse: bool,
            dropout: float,
            is_causal: bool,
            scale: float,
        ) -> Any:
            assert query.shape[1] == key.shape[1]
            out, lse = CpuKernel().forward(query, key, value, is_causal, scale)
            return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)), None, None

        def _scaled_dot_product_efficient_attention_backward(
            self,
            gradient: Any,
            query: Any,
            key: Any,
            value: Any,
            bias: None,
            out: Any,
            lse: Any,
            *rest: Any,
            scale: float,
        ) -> Any:
            assert query.shape[1] == key.shape[1]
            assert lse.shape[2] == 32
            exact = lse[..., : query.shape[2]].contiguous()
            return CpuKernel().backward(gradient, (query, key, value, out, exact), rest[-1], scale)

    for key_heads in (6, 2, 1):
        query, key, value, gradient = (torch.randn(2, heads, 5, 8) for heads in (6, key_heads, key_heads, 6))
        wanted = CpuKernel().forward(query, key, value, True, 0.3)
        shares = CpuKernel().backward(gradient, (query, key, value, *wanted), True, 0.3)
        with monkeypatch.context() as patch:
            patch.setattr("shoal.parallel.sequence.kernels._aten", _Both(Efficient()))
            found = EfficientKernel().forward(query, key, value, True, 0.3)
            mine = EfficientKernel().backward(gradient, (query, key, value, *found), True, 0.3)
        for one, other in zip((*found, *mine), (*wanted, *shares), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


class _Both:
    """torch's operators, and the given ones."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name, None) or getattr(torch.ops.aten, name)


def test_the_plain_kernel_computes_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(1, 2, 7, 8) for _ in range(3))
    whole = PlainKernel().forward(query, key, value, True, 1.0)
    monkeypatch.setattr("shoal.parallel.sequence.kernels._PLAIN_QUERIES", 3)
    for one, other in zip(PlainKernel().forward(query, key, value, True, 1.0), whole, strict=True):
        assert torch.allclose(one, other)
    gradient = torch.randn_like(query)
    shares = PlainKernel().backward(gradient, (query, key, value, *whole), True, 1.0)
    for one, other in zip(shares, CpuKernel().backward(gradient, (query, key, value, *whole), True, 1.0), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_kernel_follows_device_and_head_sizes() -> None:
    assert isinstance(kernel_for(torch.empty(1, 1, 2, 7), torch.empty(1, 1, 2, 7)), CpuKernel)
    assert isinstance(kernel_for(torch.empty(1, 1, 2, 7), torch.empty(1, 1, 2, 5)), PlainKernel)
    assert isinstance(kernel_for(torch.empty(1, 1, 2, 8, device="meta"), torch.empty(1, 1, 2, 8)), PlainKernel)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_efficient_kernel_gets_outputs_by_position_as_it_reads_them(
    key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of a group, and outputs whose heads come first in memory, are copied; a slice of positions is not."""
    found: list[torch.Tensor] = []

    def backward(
        _: Any, query: Any, key: Any, value: Any, _bias: Any, out: torch.Tensor, *_rest: Any, **_others: Any
    ) -> Any:
        found.append(out)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), None

    operators = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward)
    monkeypatch.setattr("shoal.parallel.sequence.kernels._aten", operators)
    query, key, value = torch.randn(2, 4, 6, 16), torch.randn(2, key_heads, 6, 16), torch.randn(2, key_heads, 6, 8)
    by_position = torch.randn(2, 9, 4, 8).transpose(1, 2)[:, :, 1:7]
    for out in (by_position.contiguous(), by_position):
        found.clear()
        saved = query, key, value, out, torch.randn(2, 4, 6)
        EfficientKernel().backward(torch.randn(2, 4, 6, 8), saved, True, 1.0)
        assert all(part.stride()[2:] == (key_heads * 8, 1) for part in found)
        assert torch.equal(torch.stack(found, 2).flatten(1, 2), out)
    assert (found[0].data_ptr() == by_position.data_ptr()) == (key_heads == 4)


@pytest.mark.parametrize(
    ("major", "of_half", "of_bf16"), [(7, EfficientKernel, PlainKernel), (9, FlashKernel, FlashKernel)]
)
def test_the_kernel_follows_the_generation_of_the_gpu(
    major: int, of_half: type, of_bf16: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.parallel.sequence.kernels.capability", lambda _: (major, 5))
    for dtype, kind in ((torch.float16, of_half), (torch.bfloat16, of_bf16), (torch.float32, EfficientKernel)):
        some: Any = SimpleNamespace(shape=(1, 1, 2, 64), dtype=dtype, device=torch.device("cuda"))
        assert type(kernel_for(some, some)) is kind


@pytest.mark.parametrize(
    ("capability", "size", "kind"),
    [
        ((8, 6), 192, FlashKernel),
        ((8, 6), 200, EfficientKernel),
        ((8, 9), 224, EfficientKernel),
        ((12, 0), 208, EfficientKernel),
        ((8, 9), 232, FlashKernel),
        ((8, 0), 224, FlashKernel),
        ((9, 0), 224, FlashKernel),
        ((10, 0), 224, FlashKernel),
    ],
)
def test_where_flash_has_no_backward_for_a_head_size_another_kernel_is_used(
    capability: tuple[int, int], size: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.parallel.sequence.kernels.capability", lambda _: capability)
    some: Any = SimpleNamespace(shape=(1, 1, 2, size), dtype=torch.bfloat16, device=torch.device("cuda"))
    assert type(kernel_for(some, some)) is kind
