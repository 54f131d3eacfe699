"""What DeepSpeed's engine has around the exchange of gradients: is it a mean, and whose rows are exchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shoal.errors import NotBuiltError
from shoal.sharding.sparse_sum import exchange_counts, gather_padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine.settings import Plan
    from shoal.sharding.param_group import ParameterGroup
    from shoal.zero.runtime import ShardedModel
    from shoal.zero.settings import Axes


_LABEL = "rows of a script"


class _Rows(Protocol):
    """DeepSpeed's ``SparseTensor``: shapes [n] and [n, width]."""

    indices: Any
    values: Any
    orig_dense_tensor: Any

    def to_coo_tensor(self) -> torch.Tensor: ...


class SparseFace(nn.Module):
    """What ``Engine`` has for the sake of scripts that look after the exchange of gradients themselves."""

    _is_averaging = True

    if TYPE_CHECKING:
        axes: Axes
        plan: Plan
        sharded: ShardedModel
        _groups: list[ParameterGroup]

        @property
        def data_parallel_group(self) -> Any: ...

    @property
    def gradient_average(self) -> bool:
        """Are gradients the mean over the ranks, as the configuration has it? Set to false: their sum, from the next
        backward pass on, on every rank alike.
        """
        return self._is_averaging

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        self._is_averaging = bool(value)
        plan = self.plan.precision.gradient
        pre, post = (plan.pre_scale, plan.post_scale) if value else (1.0, 1.0)
        for group in self._groups:
            group.gradient.policy = replace(group.gradient.policy, pre_scale=pre, post_scale=post)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names of the weights whose gradients go to the other ranks as rows."""
        return set(self.sharded.sparse_names)

    def all_gather_scalar(self, value: torch.Tensor, dp_group: Any = None) -> list[torch.Tensor]:
        """Every rank's tensor, of one shape and dtype on all. Every rank calls.

        Raises: NotBuiltError: ``dp_group`` is not that of all data-parallel ranks.
        """
        return [part[0] for part in self._gathered(value.unsqueeze(0), [1] * self._size(dp_group))]

    def sparse_all_gather(self, value: torch.Tensor, dp_group: Any = None) -> list[torch.Tensor]:
        """Every rank's tensor, whose first dimension may differ from rank to rank. Every rank calls.

        Raises: NotBuiltError: as ``all_gather_scalar``.
        Communicates: 8 bytes for the lengths, and one all_gather of the longest.
        """
        self._size(dp_group)
        return self._gathered(value, exchange_counts(self.axes.world, len(value), value.device, label=_LABEL))

    @torch.no_grad()
    def _gathered(self, value: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        comm, most, shape = self.axes.world, max(lengths), value.shape[1:]
        numel = most * shape.numel()
        full = gather_padded(comm, value.reshape(-1), numel, label=_LABEL) if numel else value.new_empty(0)
        rows = full.view(comm.size, most, *shape)
        return [rows[rank, :length].clone() for rank, length in enumerate(lengths)]

    def sparse_allreduce(self, sparse: _Rows, dp_group: Any = None, dp_world_size: float | None = None) -> _Rows:
        """Give a ``SparseTensor`` the rows of all ranks, divided by their number unless ``gradient_average`` is false.

        Returns: ``sparse``. Communicates: twice ``sparse_all_gather``.
        """
        size = self._size(dp_group) if dp_world_size is None else dp_world_size
        values = sparse.values / size if self._is_averaging else sparse.values
        sparse.indices = torch.cat(self.sparse_all_gather(sparse.indices, dp_group))
        sparse.values = torch.cat(self.sparse_all_gather(values, dp_group))
        return sparse

    def sparse_allreduce_bucket(
        self, bucket: Sequence[_Rows], dp_group: Any = None, dp_world_size: float | None = None
    ) -> list[_Rows]:
        """``sparse_allreduce`` of each."""
        return [self.sparse_allreduce(sparse, dp_group, dp_world_size) for sparse in bucket]

    def sparse_allreduce_no_retain(
        self, bucket: Sequence[_Rows], dp_group: Any = None, dp_world_size: float | None = None
    ) -> None:
        """``sparse_allreduce`` of each, and the result back into the gradients that they were made of."""
        for sparse in self.sparse_allreduce_bucket(bucket, dp_group, dp_world_size):
            sparse.orig_dense_tensor.data = sparse.to_coo_tensor()

    def _size(self, dp_group: Any) -> int:
        if dp_group is not None and dp_group is not self.data_parallel_group:
            raise NotBuiltError(
                f"a group of {dp_group!r} is not the group of all data-parallel ranks.",
                do="leave dp_group out, or pass engine.data_parallel_group.",
            )
        return self.axes.world.size
