"""Keys and values that go directly to the ranks whose queries attend to them, and no others.

With a window or documents the queries of a rank attend to few keys of other ranks, and every rank knows to which. In
step s rank r sends to rank r + s the keys and values that it needs of rank r, and receives from rank r - s; in backward
it returns their gradients. Where nothing is needed nothing is sent. Four ranks, contiguous, each attending to some keys
of the rank before:

    step 1    0 -> 1    1 -> 2    2 -> 3         a causal window: not 3 -> 0, and no steps 2 and 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.comm.protocol import Communicator, Work
from shoal.parallel.sequence.exchange import Block, LocalGradients, Packed, RingPlan


def direct_blocks(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator, label: str) -> Iterator[Block]:
    """Each rank with those of its keys and values that are needed here, this one first; there may be none.

    What is received next moves while the caller computes.
    """
    sent, received = _sent(key, value, plan, comm), _received(key, value, plan, comm)
    under_way: dict[int, tuple[Tensor, list[Work]]] = {}

    def start(step: int) -> None:
        reader, source = _peers(comm, step)
        outgoing = comm.empty(sent.numel(reader), key.dtype, key.device)
        for view, tensor in zip(sent.views(outgoing, reader), (key, value), strict=True):
            _gather(tensor, plan.needed(reader, comm.rank), view)
        incoming = torch.empty(received.numel(source), dtype=key.dtype, device=key.device)
        under_way[step] = incoming, _exchange(comm, outgoing, reader, incoming, source, label)

    start(1)
    block: Block = comm.rank, key, value
    before: list[Work] = []
    for step in range(1, comm.size):
        if step + 1 < comm.size:
            start(step + 1)
        yield block
        incoming, works = under_way.pop(step)
        for work in works:
            work.wait()
        for work in before:
            work.drain()
        before = works
        _, source = _peers(comm, step)
        block = source, *received.views(incoming, source)
    yield block
    for work in before:
        work.drain()


class DirectGradients(LocalGradients):
    """Gradients that each rank returns to the owner of the keys and values."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> None:
        super().__init__(key, value, plan)
        self._plan = plan
        self._comm = comm
        self._sent, self._received = _received(key, value, plan, comm), _sent(key, value, plan, comm)
        self._share = self._own
        self._under_way: tuple[int, Tensor, list[Work]] | None = None

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        if source == self._comm.rank:
            return super().begin(source)
        self._share = self._comm.empty(self._sent.numel(source), self._dtype, self._device).zero_()
        return self._sent.views(self._share, source)

    def end(self, source: int) -> None:
        if source == self._comm.rank:
            return
        self._add()
        reader, _ = _peers(self._comm, (self._comm.rank - source) % self._comm.size)
        incoming = torch.empty(self._received.numel(reader), dtype=self._dtype, device=self._device)
        works = _exchange(self._comm, self._share, source, incoming, reader, self._label)
        self._under_way = reader, incoming, works

    def own(self) -> tuple[Tensor, Tensor]:
        self._add()
        return self._packed.views(self._own, self._comm.rank)

    def _add(self) -> None:
        """Wait for the gradients of the last step, and add them."""
        if self._under_way is None:
            return
        reader, incoming, works = self._under_way
        for work in works:
            work.drain()
        places = self._plan.needed(reader, self._comm.rank)
        mine = self._packed.views(self._own, self._comm.rank)
        for own, view in zip(mine, self._received.views(incoming, reader), strict=True):
            for place, part in _places(own, places, view):
                place.add_(part)


def _peers(comm: Communicator, step: int) -> tuple[int, int]:
    """The rank that is sent keys in a step, and the rank that they are received from."""
    return (comm.rank + step) % comm.size, (comm.rank - step) % comm.size


def _sent(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> Packed:
    """What other ranks need of this one."""
    return Packed(key, value, [_total(plan.needed(reader, comm.rank)) for reader in range(comm.size)])


def _received(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> Packed:
    """What this rank needs of others."""
    return Packed(key, value, [_total(plan.needed(comm.rank, source)) for source in range(comm.size)])


def _total(places: Sequence[range]) -> int:
    return sum(len(some) for some in places)


def _places(tensor: Tensor, places: Sequence[range], packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places of [B, K, L, E], each with its part of ``packed``: [B, K, total, E]."""
    parts = packed.split([len(some) for some in places], 2)
    for some, part in zip(places, parts, strict=True):
        yield tensor[:, :, some.start : some.stop], part


def _gather(tensor: Tensor, places: Sequence[range], out: Tensor) -> None:
    for place, part in _places(tensor, places, out):
        part.copy_(place)


def _exchange(comm: Communicator, outgoing: Tensor, to: int, incoming: Tensor, origin: int, label: str) -> list[Work]:
    """Send and receive what is not empty."""
    works: list[Work] = []
    # Not all ranks of a circle send first: NCCL does a pair's sends and receives one after the other.
    for is_send in (True, False) if comm.rank < to else (False, True):
        if is_send and outgoing.numel():
            works.append(comm.send(outgoing, to, label=label))
        elif not is_send and incoming.numel():
            works.append(comm.recv(incoming, origin, label=label))
    return works
