"""The gradient of an embedding whose optimizer sees it as a sparse tensor: rows from autograd to the step.

Only where every rank holds the whole embedding (stage 0) and the optimizer steps the model's own parameters; elsewhere
rows are added up in a dense sum and sent as rows (``sparse_sum``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.sharding.gradient import GradientState
from shoal.sharding.layout import Segment
from shoal.sharding.shown_gradient import ShownGradient
from shoal.sharding.sparse_sum import coalesced, exchange_counts, sum_rows

_DENSE = -1  # in place of a number of rows: this rank's gradient is not sparse


class SparseGradient(ShownGradient):
    """The gradient of a parameter group of one embedding.

    A row is in the sum if some rank looked it up, also where its gradient is zero: lazy optimizers update such rows.
    Where a rank's gradient is dense (the weight is a head too), the sum is dense on all ranks, as it would be on one.

    Memory: the rows that this rank has of the step under way, and from the reduction on those of all ranks.
    """

    is_sparse = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._comm = self.buffer.comm
        self._part: torch.Tensor | None = None  # of passes that no reduction has seen; sparse and coalesced, or dense
        self._total: torch.Tensor | None = None  # over the ranks
        (self._spec,) = self.layout.specs

    # from parameter.grad

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the parameter's gradient to the part of this rank, without communication."""
        (parameter,) = self.parameters
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self.has_grad[0] = 1
        if self._part is not None:
            self.sum.dtype = self.sum_dtype
        new = coalesced(gradient, self.sum_dtype) if gradient.is_sparse else gradient.to(self.sum_dtype)
        self._part = new if self._part is None else _plus(self._part, new)
        if self.state is GradientState.NONE:
            self.state = GradientState.ACCUMULATING

    def has_unreduced(self) -> bool:
        return self._part is not None or self._has_new()

    # over the ranks

    def reduce(self, *, at_step: bool) -> None:
        """Sum the rows of all ranks. Order: blocks until every rank has come.

        Communicates: one exchange of 8 bytes; two all_gathers, of the most indices and rows that a rank has; in their
        place one all_reduce of the table where a rank's gradient is dense.
        """
        self.num_reductions += 1
        self.accumulate()
        part, self._part = self._part, None
        new = self._over_ranks(part)
        if new is not None:
            self._total = new if self._total is None else _plus(self._total, new)
        self.state = GradientState.REDUCED

    @torch.no_grad()
    def _over_ranks(self, part: torch.Tensor | None) -> torch.Tensor | None:
        device, label = self.buffer.device, self.buffer.label
        policy = self.policy
        sent = policy.reduce_dtype or self.dtype
        count = 0 if part is None else part._nnz() if part.is_sparse else _DENSE
        counts = exchange_counts(self._comm, count, device, label=label)
        if _DENSE in counts:
            flat = self._comm.empty(self.layout.numel, sent, device)
            flat.zero_()
            if part is not None:
                table = part.to_dense() if part.is_sparse else part
                flat[: self._spec.numel] = table.mul(policy.pre_scale).reshape(-1)
            self._comm.blocking.all_reduce(flat, scale=policy.post_scale, label=label)
            return flat[: self._spec.numel].view(self._spec.shape).to(self.sum_dtype)
        if not any(counts):
            return part
        part = self._empty() if part is None else part
        values = part.values().mul(policy.pre_scale).to(sent)
        rows, total = sum_rows(self._comm, part.indices()[0], values, counts, policy.post_scale, label=label)
        return self._sparse(rows, total.to(self.sum_dtype))

    def _sparse(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shape = self._spec.shape
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False, device=values.device
        )

    def _empty(self) -> torch.Tensor:
        device = self.buffer.device
        values = torch.zeros(0, *self._spec.shape[1:], dtype=self.sum_dtype, device=device)
        return self._sparse(torch.zeros(0, dtype=torch.int64, device=device), values)

    def wait(self, *, at_step: bool) -> bool:
        return True  # ``reduce`` has waited

    @property
    def _can_be_shown(self) -> bool:
        return self.buffer.dtype == self.sum_dtype  # the sum has the dtype of sums, whatever dtype was sent

    # what it holds

    def value(self, slot: int) -> torch.Tensor:
        if self._total is None:
            self._total = self._empty()
        return self._total

    @torch.no_grad()
    def _replace(self, slot: int, value: torch.Tensor | None) -> None:
        if value is None:
            self._total = None
        else:
            self._total = coalesced(value, self.sum_dtype) if value.is_sparse else value.to(self.sum_dtype)

    def _leave_memory(self) -> None:
        """Nothing: each sum is a tensor of its own."""

    @torch.no_grad()
    def write(self, slot: int, segment: Segment, values: torch.Tensor) -> None:
        self.take_back()
        self._total = values.to(self.sum_dtype).view(self._spec.shape).to_sparse(1)
        self.show_sum()

    def norm_part(self) -> torch.Tensor:
        total, rank, size = self._total, self._comm.rank, self._comm.size
        if total is None:
            return torch.empty(0, dtype=self.sum_dtype, device=self.buffer.device)
        values = total.values() if total.is_sparse else total
        begin, end = (len(values) * number // size for number in (rank, rank + 1))
        return values[begin:end].reshape(-1)

    def owned(self) -> torch.Tensor:
        """The gradient in one flat tensor, for the accessors; a copy."""
        flat = torch.zeros(self.layout.numel, dtype=self.sum_dtype, device=self.buffer.device)
        gradient = self._total if self._total is not None else self._part
        if gradient is not None:
            flat[: self._spec.numel] = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
        return flat

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are there now, indices included."""
        return sum(tensor.nbytes for rows in (self._part, self._total) for tensor in _pack(rows).values())

    def reset(self) -> None:
        super().reset()
        self._part = self._total = None
        self.sum.dtype = self.policy.accumulate_dtype or self.buffer.dtype

    # as plain values

    def rows(self) -> dict[str, Any] | None:
        """What is open between two passes; None: nothing is."""
        if self.state is GradientState.NONE and not self._has_new():
            return None
        self.accumulate()
        return {"part": _pack(self._part), "total": _pack(self._total)}

    def set_rows(self, saved: Mapping[str, Any]) -> None:
        """Set what ``rows`` gave."""
        self._part, self._total = self._unpack(saved["part"]), self._unpack(saved["total"])

    def _unpack(self, packed: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        device = self.buffer.device
        if "table" in packed:
            return packed["table"].to(device)
        if "indices" in packed:
            return self._sparse(packed["indices"].to(device), packed["values"].to(device))
        return None


def _plus(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Sparse where both are. The rows of either stay, also where they add up to zero."""
    if one.is_sparse and other.is_sparse:
        return (one + other).coalesce()
    return other + one if one.is_sparse else one + other  # torch adds a sparse tensor to a dense one, in this order


def _pack(gradient: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if gradient is None:
        return {}
    if not gradient.is_sparse:
        return {"table": gradient}
    return {"indices": gradient.indices()[0], "values": gradient.values()}
