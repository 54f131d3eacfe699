"""The group that takes the place of torch's in the check of streams: NCCL's values, and NCCL's orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

import shoal
from shoal.comm.nccl import NcclCommunicator
from shoal.comm.protocol import Communicator, Message
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.streams import host_memory
from tests.helpers.stream_matrix import accelerator_of_thread


def found_by(run: Callable[[Communicator], object]) -> list[str]:
    """What the check of two ranks reports."""

    def rank() -> list[str]:
        world = current_world()
        with shoal.check_streams(raises=False) as check:
            comm = world.communicator("dp", Mesh.of(world.size))
            assert isinstance(comm.backend, NcclCommunicator)
            run(comm)
        return [str(finding) for finding in check.findings]

    return [text for texts in run_ranks(2, rank) for text in texts]


def hop(comm: Communicator, sent: torch.Tensor, received: torch.Tensor) -> list[Message]:
    """The messages by which two ranks exchange tensors."""
    return [Message("send", sent, 1 - comm.rank, "hop"), Message("recv", received, 1 - comm.rank, "hop")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_verb_gives_its_values(dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        mine = torch.full((4,), float(comm.rank + 1), dtype=dtype)
        full, out, total = torch.zeros(8, dtype=dtype), torch.ones(2), torch.ones(2, dtype=dtype)
        works = [
            comm.all_gather(full, mine, label="gather"),
            comm.reduce_scatter(mine, out, scale=1 / 3, accumulate=True, label="reduce"),
            comm.reduce_scatter(mine, total, scale=0.5, label="mean"),
            comm.all_to_all(parts := torch.zeros_like(mine), mine, label="parts"),
            comm.broadcast(given := mine.clone(), 1, label="broadcast"),
        ]
        rows = comm.exchange(mine[:1], label="exchange")
        comm.all_reduce(summed := mine.clone(), label="sum").wait()
        for work in works:
            work.wait()
        assert full.tolist() == [1.0] * 4 + [2.0] * 4 and summed.tolist() == [3.0] * 4
        assert out.tolist() == pytest.approx([2.0, 2.0]) and total.tolist() == [1.5, 1.5]
        assert parts.tolist() == [1.0, 1.0, 2.0, 2.0] and given.tolist() == [2.0] * 4
        assert rows.wait().tolist() == [[1.0], [2.0]]
        first, second = (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send)
        first(full, 1 - comm.rank, label="a").wait()
        second(full, 1 - comm.rank, label="b").drain()
        received = torch.zeros_like(mine)
        comm.batch(hop(comm, mine, received)).wait()
        assert received.tolist() == [2.0 - comm.rank] * 4

    assert found_by(run) == []


def test_each_stream_that_uses_a_result_waits_for_it() -> None:
    def run(comm: Communicator) -> None:
        full = torch.zeros(8)
        work = comm.all_gather(full, torch.ones(4), label="gather")
        other = accelerator_of_thread().stream()
        work.wait()
        with other:
            full.mul(2)

    found = found_by(run)
    assert len(found) == 2 and "copy stream 0 must wait for the stream of collectives" in found[0]


def test_a_source_that_is_written_before_the_wait_is_found_also_where_the_result_lies_in_it() -> None:
    def run(comm: Communicator) -> None:
        full = torch.ones(8)
        own = full.view(2, 4)[comm.rank]
        work = comm.reduce_scatter(full, own, label="gradients")
        full.view(2, 4)[1 - comm.rank].zero_()
        work.wait()

    found = found_by(run)
    assert len(found) == 2
    assert all(
        "before reduce_scatter 'gradients' on the stream of collectives on 'dp' reads it" in text for text in found
    )


def test_memory_of_a_source_lives_until_the_wait() -> None:
    def run(comm: Communicator) -> None:
        full = torch.zeros(8)
        works = [comm.all_gather(full, torch.ones(4) * 2, label="gather")]
        torch.ones(64)  # would reuse the source's memory
        works.pop().wait()
        works.append(comm.all_gather(full, torch.ones(4) * 2, label="dropped"))
        works.clear()
        torch.ones(64)

    found = found_by(run)
    assert len(found) == 2 and all("all_gather 'dropped'" in text and "the memory was freed" in text for text in found)


def test_nccl_is_given_no_memory_of_the_host() -> None:
    def run(comm: Communicator) -> None:
        comm.all_gather(host_memory(torch.zeros(8), is_pinned=True), torch.ones(4), label="gather")

    with pytest.raises(AssertionError, match="NCCL is given host memory for all_gather 'gather'"):
        found_by(run)


def test_a_batch_is_waited_for_before_what_it_sends_is_written_and_what_it_receives_is_read() -> None:
    def run(comm: Communicator) -> None:
        sent, received = torch.ones(4), torch.zeros(4)
        work = comm.batch(hop(comm, sent, received))
        sent.fill_(2.0)
        received.mul(2)
        work.wait()
        sent.fill_(3.0)
        received.mul(3)

    found = found_by(run)
    assert len(found) == 4 and all("batch 'hop'" in text for text in found)


def test_only_messages_of_one_batch_cross_each_other() -> None:
    def run(comm: Communicator) -> None:
        for message in hop(comm, torch.ones(4), torch.zeros(4)):
            comm.batch([message])

    assert any("deadlock" in text and "a message 'hop' from rank 0 to rank 1" in text for text in found_by(run))


def test_messages_of_two_communicators_cross_each_other() -> None:
    def run(comm: Communicator) -> None:
        world = current_world()
        other = world.communicator("dp", Mesh.of(world.size), number=1)
        assert other is world.communicator("dp", Mesh.of(world.size), number=1) is not comm
        first, second = (comm, other) if comm.rank == 0 else (other, comm)
        received = torch.zeros(4)
        sends = first.send(torch.full((4,), 1.0 + comm.rank), 1 - comm.rank, label=f"of {comm.rank}")
        second.recv(received, 1 - comm.rank, label=f"of {1 - comm.rank}").wait()
        assert received.tolist() == [2.0 - comm.rank] * 4
        sends.drain()

    assert found_by(run) == []


def test_what_is_issued_after_a_batch_waits_for_all_its_messages() -> None:
    def run(comm: Communicator) -> None:
        late, parts = torch.zeros(4), (torch.zeros(4), torch.zeros(4))
        if comm.rank == 0:
            comm.recv(late, 1, label="late")
        verb: Literal["send", "recv"] = "recv" if comm.rank else "send"
        comm.batch([Message(verb, part, 1 - comm.rank, f"part {number}") for number, part in enumerate(parts)])
        if comm.rank == 1:
            comm.send(late, 0, label="late")

    assert any("deadlock" in text and "'late'" in text for text in found_by(run))
