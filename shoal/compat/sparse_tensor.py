"""``deepspeed.runtime.sparse_tensor``: rows of a table, as indices and values, and their exchange by a script.

rows 1 and 4 of a table of 6 x 2     indices [1, 4]   values [[.1, .2], [.3, .4]]   dense_size [6, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shoal.comm.protocol import Communicator
from shoal.errors import AssertedUsageError
from shoal.sharding.sparse_sum import exchange_counts, gather_padded

_LABEL = "sparse gradients of a script"


class SparseTensor:
    """The rows of a sparse gradient; a row may be there more than once, and counts as the sum of its values.

    ``indices`` has the shape [n], ``values`` [n, width]; ``dense_size`` is that of the whole, as a list. Without a
    ``dense_tensor`` there are no rows yet.

    Raises: AssertedUsageError: ``dense_tensor`` is not sparse (DeepSpeed asserts it).
    """

    def __init__(self, dense_tensor: torch.Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        if not dense_tensor.is_sparse or dense_tensor.sparse_dim() != 1:
            raise AssertedUsageError(
                f"SparseTensor is only built from a natively sparse gradient, not from a {dense_tensor.layout} tensor"
                f" of shape {tuple(dense_tensor.shape)}.",
                do="make the embedding with sparse=True, or take dense_tensor.to_sparse(1).",
                code="sparse-tensor",
            )
        rows = dense_tensor.coalesce()
        self.is_sparse = True
        self.dtype = dense_tensor.dtype
        self.indices, self.values = rows.indices().flatten(), rows.values()
        self.dense_size = list(rows.size())

    def _held(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise AssertedUsageError(
                "this SparseTensor has no rows yet.",
                do="set indices, values and dense_size, or make it from a sparse gradient.",
                code="sparse-tensor",
            )
        return self.indices, self.values, self.dense_size

    def to_coo_tensor(self) -> torch.Tensor:
        """As torch's sparse tensor, not coalesced."""
        indices, values, size = self._held()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size, check_invariants=False)

    @staticmethod
    def type() -> str:
        """DeepSpeed's name of the class."""
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """Elements that are stored, indices included, and elements of the dense tensor."""
        indices, values, size = self._held()
        return indices.numel() + values.numel(), torch.Size(size).numel()

    def add(self, b: SparseTensor) -> None:
        """Add another one's rows. Raises: AssertedUsageError: it is of another size."""
        indices, values, size = self._held()
        more, more_values, other = b._held()
        if size != other:
            raise AssertedUsageError(f"sizes differ: {size} and {other}.", code="sparse-tensor")
        self.indices, self.values = torch.cat([indices, more]), torch.cat([values, more_values])

    def __repr__(self) -> str:
        if self.indices is None or self.values is None:
            return "DeepSpeed.SparseTensor()"
        stored, whole = self.sparse_size()
        factor = whole / stored if stored else float("inf")
        return (
            f"DeepSpeed.SparseTensor(indices_size={self.indices.size()}, values_size={self.values.size()},"
            f" dense_size={self.dense_size}, device={self.indices.device}, reduction_factor={factor})"
        )


class SparseRows(Protocol):
    """DeepSpeed's ``SparseTensor``: shapes [n] and [n, width]."""

    indices: Any
    values: Any
    orig_dense_tensor: Any

    def to_coo_tensor(self) -> torch.Tensor: ...


def gather_lengths(comm: Communicator, value: torch.Tensor) -> list[int]:
    """The first dimension of every rank's tensor. Communicates: 8 bytes per rank."""
    return exchange_counts(comm, len(value), value.device, label=_LABEL)


@torch.no_grad()
def gather_parts(comm: Communicator, value: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's tensor. Communicates: one all_gather of the longest.

    Args:
        lengths: the first dimension of every rank's tensor.
    """
    most, shape = max(lengths), value.shape[1:]
    numel = most * shape.numel()
    full = gather_padded(comm, value.reshape(-1), numel, label=_LABEL) if numel else value.new_empty(0)
    rows = full.view(comm.size, most, *shape)
    return [rows[rank, :length].clone() for rank, length in enumerate(lengths)]
