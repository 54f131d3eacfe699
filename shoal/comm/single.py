"""One rank alone on its axis: every collective is done by the call, without a copy where none is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.finished import FinishedWork, check_divides, check_peer, split_parts
from shoal.comm.protocol import Work
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.comm.wire import WireFormat


class SingleCommunicator:
    """The only rank on ``axis``. ``scale``, ``accumulate``, ``out`` and ``shard`` have their meaning.

    Nothing is sent, so that a wire format has no effect.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.rank = 0
        self.size = 1
        self._sum = RankOrderedSum()

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work:
        check_divides("all_gather", full, shard, 1, label=label)
        if shard is not None and not is_same_memory(full, shard):
            full.detach().copy_(shard)
        return FinishedWork(full)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: WireFormat | None = None,
    ) -> Work:
        check_divides("reduce_scatter", full, out, 1, label=label)
        return FinishedWork(self._sum([full], out, scale=scale, accumulate=accumulate))

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
        for tensor, splits in ((out, out_splits), (source, source_splits)):
            split_parts(tensor, splits, 1, label=label)
        return self.all_gather(out, source, label=label)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("send", peer, 0, 1, label=label)
        return FinishedWork(tensor)

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("recv", peer, 0, 1, label=label)
        return FinishedWork(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        return FinishedWork(tensor)

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        return FinishedWork(vector.clone().view(1, -1))

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return [json.loads(json.dumps(value))]

    def barrier(self, *, label: str) -> None:
        return None

    def drain(self) -> None:
        return None

    def close(self) -> None:
        return None
