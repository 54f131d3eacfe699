"""Gathers tensors whose first dimension differs from rank to rank, for scripts that exchange sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shoal.comm.protocol import Communicator
from shoal.sharding.sparse_sum import exchange_counts, gather_padded

_LABEL = "sparse gradients of a script"


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
