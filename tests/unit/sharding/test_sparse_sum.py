"""Rows of a table, added to a range that may cut them."""

from __future__ import annotations

import pytest
import torch

from shoal.build.plan import sparse_names
from shoal.comm.fake import SingleCommunicator
from shoal.sharding.sparse_sum import SparseSum, add_rows, coalesced, rows_in


@pytest.mark.parametrize("width", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("shard", [2, 5, 8, 64])
@pytest.mark.parametrize("is_accumulated", [False, True])
def test_the_ranges_of_all_ranks_together_hold_every_row_once(width: int, shard: int, is_accumulated: bool) -> None:
    num_rows = 9
    rows = torch.tensor([0, 1, 4, 5, 8])
    total = torch.randn(len(rows), width)
    padded = -(-num_rows * width // shard) * shard + shard
    start = torch.randn(padded) if is_accumulated else torch.zeros(padded)
    expected = start.clone()
    expected[: num_rows * width].view(num_rows, width)[rows] += total
    for begin in range(0, padded, shard):
        part = start[begin : begin + shard].clone()
        add_rows(part, begin, width, rows, total)
        assert torch.equal(part, expected[begin : begin + shard])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_that_are_not_zero_are_found_whatever_is_in_them(dtype: torch.dtype) -> None:
    table = torch.zeros(9, 3, dtype=dtype)
    table[1, 0], table[2], table[4, 2], table[6, 1] = -1.0, torch.tensor([1.0, 0.0, -1.0]), float("nan"), float("-inf")
    table[8, 1] = torch.finfo(dtype).tiny
    assert rows_in(table).tolist() == [1, 2, 4, 6, 8]
    assert rows_in(table[:1]).tolist() == rows_in(table[:0]).tolist() == rows_in(table[:, :0]).tolist() == []


def test_no_rows_change_nothing() -> None:
    out = torch.ones(10)
    add_rows(out, 5, 3, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    assert torch.equal(out, torch.ones(10))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_and_one_that_adds_up_to_zero_are_sent(value: float) -> None:
    full = torch.zeros(64 * 2)
    full[:20].view(10, 2)[3] = torch.tensor([1.0, -1.0])
    full[:20].view(10, 2)[7, 1] = value
    expected = full * 0.5
    out = torch.empty_like(full)
    SparseSum(SingleCommunicator("dp"), 10, 2).reduce_scatter(full, out, scale=0.5, label="table")
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns though it was told
def test_entries_of_a_row_in_16_bit_are_added_in_fp32() -> None:
    values = torch.tensor([[256.0], [1.0], [1.0], [4.0]], dtype=torch.bfloat16)
    gradient = torch.sparse_coo_tensor(torch.tensor([[2, 2, 2, 0]]), values, (3, 1), check_invariants=False)
    found = coalesced(gradient, torch.float32)
    assert found.indices().tolist() == [[0, 2]]
    assert found.values().tolist() == [[4.0], [258.0]]  # one after the other in bf16: 256
    assert coalesced(gradient, torch.bfloat16).values().dtype == torch.bfloat16


def test_the_names_are_those_of_trained_embeddings_tied_ones_once() -> None:
    model = torch.nn.ModuleDict(
        {
            "lazy": torch.nn.Embedding(4, 2, sparse=True),
            "bag": torch.nn.EmbeddingBag(4, 2),
            "frozen": torch.nn.Embedding(4, 2, sparse=True).requires_grad_(False),
            "head": torch.nn.Linear(2, 4),
        }
    )
    model["head"].weight = model["lazy"].weight
    assert sparse_names(model, takes_all=False) == {"lazy.weight"}
    assert sparse_names(model, takes_all=True) == {"lazy.weight", "bag.weight"}
