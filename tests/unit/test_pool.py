"""Buffers are reused by whatever lies alike, and never while a collective reads them."""

from __future__ import annotations

import torch

from shoal.comm.single import SingleCommunicator
from shoal.memory.layout import lay_out
from shoal.memory.pool import Pool

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


def test_a_slab_has_a_view_for_each_parameter_and_is_zero_between_them() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    slab = pool.take(layout_of("a"), torch.float32)
    assert slab.flat.shape == (128,)
    assert [view.shape for view in slab.views] == [(3, 5), (5,)]
    for view in slab.views:
        view.fill_(1.0)
    assert (slab.flat[:15] == 1).all()
    assert (slab.flat[64:69] == 1).all()
    assert slab.flat.sum() == 20


def test_what_was_given_back_is_taken_by_the_next_that_lies_alike() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    first = pool.take(layout_of("a"), torch.float32)
    second = pool.take(layout_of("b"), torch.float32)
    assert first is not second
    pool.give_back(layout_of("a"), first)
    assert pool.take(layout_of("c"), torch.float32) is first
    assert pool.nbytes == 2 * 128 * 4


def test_another_dtype_or_another_layout_gets_another_slab() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    slab = pool.take(layout_of("a"), torch.float32)
    pool.give_back(layout_of("a"), slab)
    assert pool.take(layout_of("a"), torch.bfloat16).flat.dtype == torch.bfloat16
    assert pool.take(layout_of("a", (5, 3)), torch.float32) is not slab


def test_once_the_ring_is_made_a_slab_is_handed_out_only_after_its_reader_is_drained_and_oldest_first() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    slabs = [pool.take(layout_of("a"), torch.float32) for _ in range(4)]
    readers = [Reader() for _ in slabs]
    for slab, reader in zip(slabs, readers, strict=True):
        pool.give_back(layout_of("a"), slab, reader)
    assert [reader.num_drained for reader in readers] == [0, 0, 0, 0]
    assert pool.take(layout_of("a"), torch.float32) is slabs[0]
    assert [reader.num_drained for reader in readers] == [1, 0, 0, 0]


def test_until_the_ring_is_made_a_rank_does_not_wait_for_a_reader_but_takes_a_new_slab() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    for name in "abcdef":
        pool.expect(layout_of(name))
    slabs, readers = [], [Reader() for _ in range(6)]
    for name, reader in zip("abcdef", readers, strict=True):
        slabs.append(pool.take(layout_of(name), torch.float32))
        pool.give_back(layout_of(name), slabs[-1], reader)
    assert len({id(slab) for slab in slabs}) == 4
    assert slabs[4] is slabs[0]
    assert [reader.num_drained for reader in readers] == [1, 1, 0, 0, 0, 0]


def test_a_bucket_whose_layout_is_its_own_has_one_slab() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    pool.expect(layout_of("a"))
    for _ in range(5):
        pool.give_back(layout_of("a"), pool.take(layout_of("a"), torch.float32), Reader())
    assert pool.nbytes == 128 * 4


def test_clear_forgets_everything() -> None:
    pool = Pool(SingleCommunicator("dp"), CPU)
    slab = pool.take(layout_of("a"), torch.float32)
    pool.give_back(layout_of("a"), slab)
    pool.clear()
    assert pool.nbytes == 0
    assert pool.take(layout_of("a"), torch.float32) is not slab
