"""DeepSpeed's ``SparseTensor``: made of a sparse gradient, added to, and given back."""

from __future__ import annotations

import pytest
import torch

from shoal.compat.deepspeed.runtime.sparse_tensor import SparseTensor


def table(*rows: int) -> torch.Tensor:
    dense = torch.zeros(6, 2)
    for row in rows:
        dense[row] += torch.tensor([row + 1.0, -1.0])
    return dense


def test_it_stores_the_rows_of_a_sparse_tensor_and_adds_others() -> None:
    one, other = SparseTensor(table(1, 4).to_sparse(1)), SparseTensor(table(4, 5).to_sparse(1))
    assert one.indices.tolist() == [1, 4] and one.dense_size == [6, 2] and one.is_sparse
    assert one.sparse_size() == (6, 12)
    one.add(other)
    assert one.indices.tolist() == [1, 4, 4, 5]
    assert torch.equal(one.to_coo_tensor().to_dense(), table(1, 4) + table(4, 5))
    assert SparseTensor.type() == "deepspeed.SparseTensor"
    assert "reduction_factor=1.0" in repr(one)


def test_an_uncoalesced_gradient_is_added_up() -> None:
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([3, 3, 0])).sum().backward()
    held = SparseTensor(embedding.weight.grad)
    assert held.orig_dense_tensor is embedding.weight.grad
    assert held.indices.tolist() == [0, 3]
    assert held.values.tolist() == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("given", [torch.ones(3, 2), torch.eye(3).to_sparse()], ids=["dense", "two sparse dims"])
def test_what_is_no_table_of_rows_is_an_assertion_as_with_deepspeed(given: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="natively sparse"):
        SparseTensor(given)


def test_without_rows_there_is_nothing_to_give_back_or_add() -> None:
    empty = SparseTensor()
    assert empty.indices is None and empty.values is None and repr(empty) == "DeepSpeed.SparseTensor()"
    with pytest.raises(AssertionError, match="no rows yet"):
        empty.to_coo_tensor()
    with pytest.raises(AssertionError, match=r"sizes differ: \[6, 2\] and \[3, 2\]"):
        SparseTensor(table(1).to_sparse(1)).add(SparseTensor(torch.ones(3, 2).to_sparse(1)))
