"""One rank alone on its axis: every collective is done by the call, without a copy where none is needed."""

from __future__ import annotations

import torch

from shoal.comm.fake import FakeCommunicator
from shoal.comm.protocol import Work
from shoal.comm.wire import WireFormat


class SingleCommunicator(FakeCommunicator):
    """The only rank on ``axis``. ``scale``, ``accumulate``, ``out`` and ``shard`` have their meaning.

    Nothing is sent, so that a wire format has no effect.
    """

    def __init__(self, axis: str) -> None:
        super().__init__(axis, 0, 1)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work:
        return super().all_gather(full, shard, label=label)

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
        return super().reduce_scatter(full, out, scale=scale, accumulate=accumulate, label=label)
