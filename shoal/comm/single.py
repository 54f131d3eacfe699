"""One rank alone on its axis: every collective is done at once, and what needs no copy makes none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.finished import FinishedWork, check_divides
from shoal.comm.protocol import Work
from shoal.comm.sums import RankOrderedSum, is_same_memory


class SingleCommunicator:
    """The only rank on ``axis``. Scale, ``accumulate``, ``out`` and ``shard`` are honoured; nothing else is done."""

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

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        check_divides("all_gather", full, shard, 1, label=label)
        if shard is not None and not is_same_memory(full, shard):
            full.detach().copy_(shard)
        return FinishedWork(full)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        check_divides("reduce_scatter", full, out, 1, label=label)
        return FinishedWork(self._sum([full], out, scale=scale, accumulate=accumulate))

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        return FinishedWork(self._sum([full], full, scale=scale))

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
