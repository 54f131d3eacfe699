"""A rank of a world whose other ranks do not exist: nothing is sent; shapes and records are those of a real run.

Received values are made from this rank's own, so that they stay finite where tensors have values: a reduction takes
this rank's own range (as if all others had zeros), a gathered tensor keeps its other values, a receive and the
other ranks' parts of an all_to_all are zeros.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.finished import (
    FinishedWork,
    check_both_splits,
    check_divides,
    check_peer,
    own_range,
    split_mismatch,
    split_parts,
)
from shoal.comm.protocol import Backend, Work
from shoal.comm.sums import RankOrderedSum, is_same_memory


class FakeCommunicator:
    """``size`` ranks on ``axis``, of which only ``rank`` exists."""

    def __init__(self, axis: str, rank: int, size: int) -> None:
        self.axis = axis
        self.rank = rank
        self.size = size
        self._sum = RankOrderedSum()

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        check_divides("all_gather", full, shard, self.size, label=label)
        own = own_range(full, self.rank, self.size)
        if shard is not None and not is_same_memory(own, shard):
            own.detach().copy_(shard)
        return FinishedWork(full)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        check_divides("reduce_scatter", full, out, self.size, label=label)
        own = own_range(full, self.rank, self.size)
        return FinishedWork(self._sum([own], out, scale=scale, accumulate=accumulate))

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        return FinishedWork(self._sum([full], full, scale=scale))

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        check_both_splits(out_splits, source_splits, label=label)
        own = split_parts(source, source_splits, self.size, label=label)[self.rank]
        parts = split_parts(out, out_splits, self.size, label=label)
        if parts[self.rank].numel() != own.numel():
            raise split_mismatch(self.axis, label, self.rank, self.rank, own.numel(), parts[self.rank].numel())
        for peer, part in enumerate(parts):
            if peer != self.rank:
                part.zero_()
            elif not is_same_memory(part, own):
                part.copy_(own)
        return FinishedWork(out)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("send", peer, self.rank, self.size, label=label)
        return FinishedWork(tensor)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("recv", peer, self.rank, self.size, label=label)
        tensor.detach().zero_()
        return FinishedWork(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        return FinishedWork(tensor)

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        return FinishedWork(vector.detach().view(1, -1).repeat(self.size, 1))

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        text = json.dumps(value)
        return [json.loads(text) for _ in range(self.size)]

    def barrier(self, *, label: str) -> None:
        return None

    def drain(self) -> None:
        return None

    def close(self) -> None:
        return None


class FakeTransport:
    """Opens communicators for rank ``rank`` of a dry run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def open(self, axis: str, groups: Sequence[tuple[int, ...]]) -> Backend:
        ranks = next(group for group in groups if self._rank in group)
        return FakeCommunicator(axis, ranks.index(self._rank), len(ranks))

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        return None

    def close(self) -> None:
        return None
