"""Copies between a GPU and the host run beside computing; each use waits for its own copy, and for nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.protocol import FinishedWork
from shoal.comm.threads import run_ranks
from shoal.memory.stream_copies import ComputeStream, StreamCopies
from shoal.sharding.copied_gather import HostStorage
from shoal.sharding.param_group import ParameterGroup
from tests.helpers.fake_streams import GPU, FakeStreams
from tests.helpers.models import Plain
from tests.helpers.param_groups import gathered_group
from tests.helpers.training import batch, config, sgd, start


class Ranks:
    """An axis that logs on which stream its all-gathers are issued and waited for."""

    rank = 0

    def __init__(self, streams: FakeStreams, size: int) -> None:
        self.streams, self.size = streams, size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def drain(self) -> None:
        return None

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: None = None
    ) -> Any:
        if shard is not None:
            full[: shard.numel()].copy_(shard)
        self.streams.log.append(f"gather issued on {self.streams.current.name}")
        return FinishedWork(full)


def offloaded_group(streams: FakeStreams, size: int) -> ParameterGroup:
    comm: Any = Ranks(streams, size)
    group = gathered_group([nn.Parameter(torch.arange(8.0))], comm, partial(HostStorage, copies=StreamCopies(GPU)))
    group.release()
    return group


@pytest.mark.parametrize("size", [1, 2])
def test_an_offloaded_shard_is_copied_and_gathered_beside_computing_which_waits_at_the_use(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = FakeStreams(monkeypatch)
    group = offloaded_group(streams, size)
    work = group.gather()
    # The memory may still be in use by what was computed before; the gather starts after the copy.
    assert streams.log == ["copy 1 waits for compute", "gather issued on copy 1", "event 1 on copy 1"]
    work.wait()
    assert streams.log[3:] == ["compute waits for copy 1 at 1"]
    group.attach_views()
    assert group.parameters[0][:4].tolist() == [0.0, 1.0, 2.0, 3.0]


class Memory:
    def __init__(self) -> None:
        self.streams: list[str] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream.name)


def test_another_stream_waits_once_for_the_one_before_and_keeps_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, memory = FakeStreams(monkeypatch), Memory()
    compute, other = ComputeStream(GPU), torch.Stream(GPU)
    compute.follow()
    assert streams.log == []
    with other:
        for _ in range(2):
            compute.follow(lambda: [memory])  # type: ignore[list-item, return-value]
    compute.follow()
    assert streams.log == ["copy 1 waits for compute", "compute waits for copy 1"]
    assert memory.streams == ["copy 1"]


def test_on_the_cpu_no_stream_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.accelerator, "current_stream", refuse)
    ComputeStream(torch.device("cpu")).follow()


@pytest.mark.parametrize("way", ["engine", "loss.backward"])
def test_training_in_one_stream_and_evaluating_in_another_are_in_order(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> list[str]:
        engine = start(Plain, config(2), sgd)
        with monkeypatch.context() as patched:
            streams = FakeStreams(patched)
            engine.sharded._compute = ComputeStream(GPU)
            training = torch.Stream(GPU)
            with training:
                loss = engine(*batch(0, 0, 1))
            if way == "engine":
                with training:
                    engine.backward(loss)
            else:
                loss.backward()  # in the stream before, as autograd may choose for a hook
            with training:
                engine.step()
            with torch.no_grad():
                engine(*batch(1, 0, 1))
            log = streams.log
        engine.destroy()
        return log

    there, back = "copy 1 waits for compute", "compute waits for copy 1"
    assert run_ranks(1, job) == [[there, back] if way == "engine" else [there, back, there, back]]
