"""Copies between a GPU and the host run beside computing; each use waits for its own copy, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.finished import FinishedWork
from shoal.memory.stream_copies import StreamCopies
from shoal.sharding.layout import lay_out
from shoal.sharding.parameter_buffer import ParameterBuffer
from tests.fake_streams import GPU, FakeStreams


class Ranks:
    """An axis that logs on which stream its all-gathers are issued and waited for."""

    rank = 0

    def __init__(self, streams: FakeStreams, size: int) -> None:
        self.streams, self.size = streams, size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def drain(self) -> None:
        return None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Any:
        if shard is not None:
            full[: shard.numel()].copy_(shard)
        self.streams.log.append(f"gather issued on {self.streams.current.name}")
        return FinishedWork(full)


def offloaded_buffer(streams: FakeStreams, size: int) -> ParameterBuffer:
    parameters = [nn.Parameter(torch.arange(8.0))]
    buffer = ParameterBuffer(
        "u",
        lay_out([("w", (8,), 0)], num_shards=size),
        torch.float32,
        torch.device("cpu"),
        Ranks(streams, size),  # type: ignore[arg-type]
        parameters,
        is_sharded=True,
        host=lambda numel, dtype: torch.empty(numel, dtype=dtype),
        copies=StreamCopies(GPU),
    )
    buffer.views[0].copy_(parameters[0].detach())
    buffer.write_back()
    buffer.attach_views()
    buffer.release()
    return buffer


@pytest.mark.parametrize("size", [1, 2])
def test_an_offloaded_shard_is_copied_and_gathered_beside_computing_which_waits_at_the_use(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = FakeStreams(monkeypatch)
    buffer = offloaded_buffer(streams, size)
    work = buffer.gather()
    # The memory may still be in use by what was computed before; the gather starts after the copy.
    assert streams.log == ["copy 1 waits for compute", "gather issued on copy 1", "event 1 on copy 1"]
    work.wait()
    assert streams.log[3:] == ["compute waits for copy 1 at 1"]
    buffer.attach_views()
    assert buffer.parameters[0][:4].tolist() == [0.0, 1.0, 2.0, 3.0]
