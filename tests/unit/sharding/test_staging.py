"""Buffers are reused by whatever lies alike, and never while a collective reads them."""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.fake import SingleCommunicator
from shoal.sharding.layout import lay_out
from shoal.sharding.offloaded_gradient import ShardBuffers
from shoal.sharding.staging import StagingBuffers

CPU = torch.device("cpu")


class Reader:
    """A collective that still reads its source."""

    def __init__(self) -> None:
        self.num_drained = 0

    def wait(self) -> torch.Tensor:
        return torch.empty(0)

    def drain(self) -> None:
        self.num_drained += 1


def layout_of(name: str, shape: tuple[int, ...] = (3, 5)) -> object:
    return lay_out([(f"{name}.w", shape, 0), (f"{name}.b", (5,), 0)], num_shards=2)


def test_a_buffer_has_a_view_for_each_parameter_and_is_zero_between_them() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    buffer = staging.acquire(layout_of("a"), torch.float32)
    assert buffer.full.shape == (128,)
    assert [view.shape for view in buffer.views] == [(3, 5), (5,)]
    for view in buffer.views:
        view.fill_(1.0)
    assert (buffer.full[:15] == 1).all()
    assert (buffer.full[64:69] == 1).all()
    assert buffer.full.sum() == 20


def test_what_was_released_is_acquired_by_the_next_that_lies_alike() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    first = staging.acquire(layout_of("a"), torch.float32)
    second = staging.acquire(layout_of("b"), torch.float32)
    assert first is not second
    staging.release(first)
    assert staging.acquire(layout_of("c"), torch.float32) is first
    assert staging.nbytes == 2 * 128 * 4


def test_another_dtype_or_another_layout_gets_another_buffer() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    buffer = staging.acquire(layout_of("a"), torch.float32)
    staging.release(buffer)
    assert staging.acquire(layout_of("a"), torch.bfloat16).dtype == torch.bfloat16
    assert staging.acquire(layout_of("a", (5, 3)), torch.float32) is not buffer


def test_after_four_buffers_the_oldest_is_reused_once_its_reader_is_done() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    buffers = [staging.acquire(layout_of("a"), torch.float32) for _ in range(4)]
    readers = [Reader() for _ in buffers]
    for buffer, reader in zip(buffers, readers, strict=True):
        staging.release(buffer, reader)
    assert [reader.num_drained for reader in readers] == [0, 0, 0, 0]
    assert staging.acquire(layout_of("a"), torch.float32) is buffers[0]
    assert [reader.num_drained for reader in readers] == [1, 0, 0, 0]


def test_below_four_buffers_a_rank_allocates_a_new_one_instead_of_waiting_for_a_reader() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    for name in "abcdef":
        staging.register(layout_of(name))
    buffers, readers = [], [Reader() for _ in range(6)]
    for name, reader in zip("abcdef", readers, strict=True):
        buffers.append(staging.acquire(layout_of(name), torch.float32))
        staging.release(buffers[-1], reader)
    assert len({id(buffer) for buffer in buffers}) == 4
    assert buffers[4] is buffers[0]
    assert [reader.num_drained for reader in readers] == [1, 1, 0, 0, 0, 0]


def test_on_an_accelerator_where_only_the_device_waits_two_are_made() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), torch.device("meta"))
    for name in "abcd":
        staging.register(layout_of(name))
    for name in "abcd":
        buffer = staging.acquire(layout_of(name), torch.float32)
        staging.release(buffer, Reader())
    assert staging.nbytes == 2 * 128 * 4


def test_a_group_whose_layout_is_its_own_has_one_buffer() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    staging.register(layout_of("a"))
    for _ in range(5):
        staging.release(staging.acquire(layout_of("a"), torch.float32), Reader())
    assert staging.nbytes == 128 * 4


def test_clear_frees_everything() -> None:
    staging = StagingBuffers(SingleCommunicator("dp"), CPU)
    buffer = staging.acquire(layout_of("a"), torch.float32)
    staging.release(buffer)
    staging.clear()
    assert staging.nbytes == 0
    assert staging.acquire(layout_of("a"), torch.float32) is not buffer


class Copied:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_two_shards_of_one_size_are_under_way_and_reuse_waits_for_the_copy_of_the_older() -> None:
    shards = ShardBuffers(CPU)
    done: list[Any] = [Copied() for _ in range(5)]
    seen = []
    for copied in done:
        seen.append(shards.acquire(100, torch.float32))
        shards.release(seen[-1], copied)
    assert seen[0] is not seen[1]
    assert [flat is seen[index % 2] for index, flat in enumerate(seen)] == [True] * 5
    assert [copied.num_waits for copied in done] == [1, 1, 1, 0, 0]
    assert shards.nbytes == 2 * 400
    shards.clear()
    assert shards.nbytes == 0


def test_shards_in_use_are_never_handed_out_twice_and_other_sizes_have_their_own() -> None:
    shards = ShardBuffers(CPU)
    held = [shards.acquire(100, torch.float32) for _ in range(3)]
    assert len({flat.data_ptr() for flat in held}) == 3
    assert shards.acquire(100, torch.bfloat16).dtype == torch.bfloat16
    assert shards.acquire(50, torch.float32).numel() == 50
    shards.release(held[0], Copied())  # type: ignore[arg-type]
    assert shards.acquire(100, torch.float32) is held[0]
    shards.discard(held[1])
    assert shards.nbytes == 2 * 400 + 200 + 200
