"""Attention of this rank's queries to the keys and values of all ranks, and how these reach it.

ring        P - 1 hops: every rank sends on to rank r + 1 what it has received from rank r - 1, and meanwhile receives
all-gather  one all-gather, and P times the memory for keys and values; one reduce-scatter of the gradients
direct      at most P - 1 sends, of those keys alone that another rank's queries attend to

    step      0        1        2              in step s rank r computes with the keys and values of rank r - s, packed
    rank 0    0 ->     2 ->     1              in one buffer, and meanwhile sends it on and receives the next one
    rank 1    1 ->     0 ->     2
    rank 2    2 ->     1 ->     0

The gradients of a buffer begin at the rank that uses it in step 1 and are sent on until they reach its owner, which
adds its own share. Outputs of tiles are merged by their log-sum-exp, in fp32; gradients are summed in fp32.

With a window or documents the queries of a rank attend to few keys of other ranks, and every rank knows to which. So in
step s rank r sends to rank r + s what that needs of its keys and values, and in backward gets their gradients from it.
Ranks have unequal work in a step, even where documents balance their sum. So where what is sent for documents is small
on every rank, all of it is sent before the first step, and gradients are waited for after the last: no rank waits for
another's step. All ranks decide alike, as the order of a communicator's sends is one on all ranks.

Source: Ring Attention (arXiv:2310.01889); FlashAttention-2's backward (arXiv:2307.08691); all-gather: Llama 3
(arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator, Message, Work
from shoal.kernels.use import has_kernels, one_kernel
from shoal.parallel.sequence.chunks import (
    Chunks,
    Tile,
    keys_of,
    most_exchanged,
    num_positions,
    of_packed_keys,
    tiles_of,
)
from shoal.parallel.sequence.kernels import HeadGroups, accumulated, dense_heads, kernel_for, sum_dtype

KeyExchange = Literal["ring", "all_gather"]
Block = tuple[int, Tensor, Tensor]  # a rank, its keys and its values

# What may be sent and received at the same time, in keys and values of one rank: twice that of two steps.
_MOST_AT_ONCE = 8


@dataclass(frozen=True)
class RingPlan:
    """What the ranks hold, and how keys and values reach them.

    Args:
        comm: None: this rank holds the whole sequence.
        chunks: of each rank.
        documents, window: as :func:`tiles_of` takes them.
        softcap: see ``PlainKernel``.
        groups: where the heads of keys serve different numbers of heads of queries; None: they divide.
    """

    comm: Communicator | None
    chunks: tuple[Chunks, ...]
    is_causal: bool
    documents: tuple[tuple[int, ...], ...] | None
    scale: float
    exchange: KeyExchange
    label: str
    window: int | None = None
    softcap: float | None = None
    groups: HeadGroups | None = None

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def is_direct(self) -> bool:
        """True if a rank receives only the keys that its queries attend to."""
        return self.exchange == "ring" and (self.window is not None or self.documents is not None)

    @property
    def is_at_once(self) -> bool:
        """True if the direct sends of all steps are under way at the same time."""
        if self.documents is None:
            return False
        return most_exchanged(self.chunks, self.documents, self.is_causal) <= _MOST_AT_ONCE * min(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """How many positions each rank holds."""
        return [num_positions(chunks) for chunks in self.chunks]

    def tiles(self, source: int) -> tuple[Tile, ...]:
        """The tiles of this rank's queries and the keys of rank ``source``, as this rank is given them."""
        tiles = self._tiles(self.rank, source)
        return of_packed_keys(tiles) if self.is_direct and source != self.rank else tiles

    def needed(self, reader: int, source: int) -> tuple[range, ...]:
        """What queries of rank ``reader`` attend to of the keys of rank ``source``: places in what that rank holds."""
        return keys_of(self._tiles(reader, source))

    def _tiles(self, reader: int, source: int) -> tuple[Tile, ...]:
        return tiles_of(self.chunks[reader], self.chunks[source], self.is_causal, self.documents, self.window)


class Packed:
    """Keys and values in one buffer, one after the other.

    Args:
        lengths: how many positions there are of each rank.
    """

    def __init__(self, key: Tensor, value: Tensor, lengths: Sequence[int]) -> None:
        self._shapes = key.shape, value.shape
        self._lengths = lengths

    def numel(self, source: int) -> int:
        return sum(shape.numel() // max(shape[2], 1) * self._lengths[source] for shape in self._shapes)

    @property
    def most(self) -> int:
        return max(map(self.numel, range(len(self._lengths))))

    def views(self, buffer: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """[B, K, S, E] and [B, K, S, F] of rank ``source``."""
        shapes = [(*shape[:2], self._lengths[source], shape[3]) for shape in self._shapes]
        numel = torch.Size(shapes[0]).numel()
        return buffer[:numel].view(shapes[0]), buffer[numel : self.numel(source)].view(shapes[1])

    def fill(self, buffer: Tensor, source: int, key: Tensor, value: Tensor) -> None:
        for view, tensor in zip(self.views(buffer, source), (key, value), strict=True):
            view.copy_(tensor)


def _pass_on(comm: Communicator, outgoing: Tensor, incoming: Tensor, label: str) -> Work:
    """Send to the next rank and receive from the one before, at the same time."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm.batch([Message("send", outgoing, following, label), Message("recv", incoming, previous, label)])


def ring_blocks(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator, label: str) -> Iterator[Block]:
    """Each rank with its keys and values, this one first. What is received next moves while the caller computes."""
    packed = Packed(key, value, plan.lengths)
    # A buffer is received into two steps after it was sent: ranks need not be in the same step.
    buffers = [comm.empty(packed.most, key.dtype, key.device) for _ in range(min(comm.size, 3))]
    packed.fill(buffers[0], comm.rank, key, value)
    views = key, value
    works: list[Work] = []
    for step in range(comm.size - 1):
        source, following = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        if step >= 2:
            works[step - 2].drain()
        current, spare = buffers[step % 3], buffers[(step + 1) % 3 % len(buffers)]
        works.append(_pass_on(comm, current[: packed.numel(source)], spare[: packed.numel(following)], label))
        yield source, *views
        works[step].wait()
        views = packed.views(spare, following)
    yield (comm.rank + 1) % comm.size, *views
    for work in works[-2:]:
        work.drain()


def gathered_blocks(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator, label: str) -> Iterator[Block]:
    """As :func:`ring_blocks`, from one all-gather."""
    packed = Packed(key, value, plan.lengths)
    own = comm.empty(packed.most, key.dtype, key.device)
    packed.fill(own, comm.rank, key, value)
    full = torch.empty(comm.size * packed.most, dtype=key.dtype, device=key.device)
    work = comm.all_gather(full, own, label=label)
    yield comm.rank, key, value
    work.drain()
    for step in range(1, comm.size):
        source = (comm.rank - step) % comm.size
        yield source, *packed.views(full[source * packed.most :], source)


class LocalGradients:
    """The gradients of the keys and values of the only rank, in the dtype of sums."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan) -> None:
        self._packed = Packed(key, value, plan.lengths)
        self._dtype = sum_dtype(key)
        self._device = key.device
        self._label = f"{plan.label} gradients"
        self._own = torch.empty(0, dtype=torch.float32, device="cpu")

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        """Zeros, to which the caller adds its share of the gradients of the keys and values of rank ``source``."""
        self._own = torch.zeros(self._packed.numel(source), dtype=self._dtype, device=self._device)
        return self._packed.views(self._own, source)

    def end(self, source: int) -> None:
        """The share is complete."""

    def own(self) -> tuple[Tensor, Tensor]:
        """The sums of all ranks' shares, of this rank's keys and values."""
        return self._packed.views(self._own, 0)


class RingGradients(LocalGradients):
    """Gradients that are sent on from rank to rank until they reach the owner of the keys and values."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> None:
        super().__init__(key, value, plan)
        self._comm = comm
        self._share = self._own
        self._under_way: Work | None = None

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        self._share = self._comm.empty(self._packed.numel(source), self._dtype, self._device).zero_()
        return self._packed.views(self._share, source)

    def end(self, source: int) -> None:
        if source == self._comm.rank:
            self._own = self._share
            return
        if self._under_way is not None:
            self._share += self._received()
        # The rank before has used the keys and values of the rank before ``source``.
        numel = self._packed.numel((source - 1) % self._comm.size)
        incoming = torch.empty(numel, dtype=self._dtype, device=self._device)
        self._under_way = _pass_on(self._comm, self._share, incoming, self._label)

    def own(self) -> tuple[Tensor, Tensor]:
        self._own += self._received()
        return self._packed.views(self._own, self._comm.rank)

    def _received(self) -> Tensor:
        """What the rank before has sent; what this rank sent has left it, too."""
        assert self._under_way is not None
        self._under_way.drain()
        return self._under_way.wait()


class GatheredGradients(LocalGradients):
    """Gradients of all ranks' keys and values, summed by one reduce-scatter."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> None:
        super().__init__(key, value, plan)
        self._comm = comm
        self._full = comm.empty(comm.size * self._packed.most, self._dtype, self._device).zero_()

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        return self._packed.views(self._full[source * self._packed.most :], source)

    def own(self) -> tuple[Tensor, Tensor]:
        out = torch.empty(self._packed.most, dtype=self._dtype, device=self._device)
        self._comm.blocking.reduce_scatter(self._full, out, label=self._label)
        return self._packed.views(out, self._comm.rank)


def direct_blocks(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator, label: str) -> Iterator[Block]:
    """As :func:`ring_blocks`, with those keys and values alone that are needed here; there may be none."""
    sent, received = _needed(key, value, plan, comm)
    under_way: dict[int, tuple[Tensor, list[Work]]] = {}

    def start(step: int) -> None:
        reader, source = _peers(comm, step)
        outgoing = comm.empty(sent.numel(reader), key.dtype, key.device)
        for view, tensor in zip(sent.views(outgoing, reader), (key, value), strict=True):
            for place, part in _places(tensor, plan.needed(reader, comm.rank), view):
                part.copy_(place)
        incoming = torch.empty(received.numel(source), dtype=key.dtype, device=key.device)
        under_way[step] = incoming, _exchange(comm, outgoing, reader, incoming, source, label)

    ahead = comm.size - 1 if plan.is_at_once else 1
    for step in range(1, ahead + 1):
        start(step)
    block: Block = comm.rank, key, value
    before: list[Work] = []
    for step in range(1, comm.size):
        if step + ahead < comm.size:
            start(step + ahead)
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
        self._received, self._sent = _needed(key, value, plan, comm)
        self._share = self._own
        self._under_way: list[tuple[int, Tensor, list[Work]]] = []

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        if source == self._comm.rank:
            return super().begin(source)
        self._share = self._comm.empty(self._sent.numel(source), self._dtype, self._device).zero_()
        return self._sent.views(self._share, source)

    def end(self, source: int) -> None:
        if source == self._comm.rank:
            return
        if not self._plan.is_at_once:
            self._add()
        reader, _ = _peers(self._comm, (self._comm.rank - source) % self._comm.size)
        incoming = torch.empty(self._received.numel(reader), dtype=self._dtype, device=self._device)
        works = _exchange(self._comm, self._share, source, incoming, reader, self._label)
        self._under_way.append((reader, incoming, works))

    def own(self) -> tuple[Tensor, Tensor]:
        self._add()
        return self._packed.views(self._own, self._comm.rank)

    def _add(self) -> None:
        """Wait for the gradients that are under way, and add them."""
        mine = self._packed.views(self._own, self._comm.rank)
        for reader, incoming, works in self._under_way:
            for work in works:
                work.drain()
            places = self._plan.needed(reader, self._comm.rank)
            for own, view in zip(mine, self._received.views(incoming, reader), strict=True):
                for place, part in _places(own, places, view):
                    place.add_(part)
        self._under_way.clear()


def blocks_of(key: Tensor, value: Tensor, plan: RingPlan, label: str) -> Iterator[Block]:
    """Each rank with its keys and values, as ``plan.tiles`` counts them; this one first."""
    if plan.comm is None:
        return iter([(0, key, value)])
    blocks = gathered_blocks if plan.exchange == "all_gather" else direct_blocks if plan.is_direct else ring_blocks
    return blocks(key, value, plan, plan.comm, label)


def gradients_of(key: Tensor, value: Tensor, plan: RingPlan) -> LocalGradients:
    """What sums the ranks' gradients of the keys and values that ``blocks_of`` has given them."""
    if plan.comm is None:
        return LocalGradients(key, value, plan)
    if plan.exchange == "all_gather":
        return GatheredGradients(key, value, plan, plan.comm)
    return (DirectGradients if plan.is_direct else RingGradients)(key, value, plan, plan.comm)


def _peers(comm: Communicator, step: int) -> tuple[int, int]:
    """The rank that is sent keys in a step, and the rank that they are received from."""
    return (comm.rank + step) % comm.size, (comm.rank - step) % comm.size


def _needed(key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> tuple[Packed, Packed]:
    """What other ranks need of this one, and what this rank needs of others."""
    ranks = range(comm.size)
    here = [sum(map(len, plan.needed(reader, comm.rank))) for reader in ranks]
    there = [sum(map(len, plan.needed(comm.rank, source))) for source in ranks]
    return Packed(key, value, here), Packed(key, value, there)


def _places(tensor: Tensor, places: Sequence[range], packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places of [B, K, L, E], each with its part of ``packed``: [B, K, total, E]."""
    parts = packed.split([len(some) for some in places], 2)
    for some, part in zip(places, parts, strict=True):
        yield tensor[:, :, some.start : some.stop], part


def _exchange(comm: Communicator, outgoing: Tensor, to: int, incoming: Tensor, origin: int, label: str) -> list[Work]:
    """Send and receive what is not empty, at the same time."""
    messages = Message("send", outgoing, to, label), Message("recv", incoming, origin, label)
    some = [message for message in messages if message.tensor.numel()]
    return [comm.batch(some)] if some else []


def ring_attention(query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, sinks: Tensor | None = None) -> Tensor:
    """Attention of this rank's queries, [B, H, L, E], to the keys and values of all ranks. Shape: [B, H, L, F].

    Args:
        key, value: [B, K, L, E] and [B, K, L, F] of this rank; K divides H.
        sinks: [H]: the score of one more key, whose value is zero; None: there is none.

    Communicates: see the module. Per rank and pass P - 1 times the bytes of its keys and values, or less; in backward
        also of their gradients in fp32.
    Memory: in forward three buffers of one rank's keys and values (two on two ranks), one tile's output, and the output
        in fp32; in backward also four of their gradients in fp32. With documents up to eight of each, if these are
        enough for the sends of all steps. Scores: see ``kernels``.
    """
    out: Tensor = _RingAttention.apply(query, key, value, sinks, plan)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: RingPlan) -> Tensor:
        query, key, value = dense_heads(query), dense_heads(key), dense_heads(value)
        kernel = kernel_for(query, value, plan.softcap, plan.groups)
        merged = _MergedOutput(query, value)
        for source, keys, values in blocks_of(key, value, plan, plan.label):
            for tile in plan.tiles(source):
                some = _of_tile(tile, query, keys, values)
                merged.add(tile, *kernel.forward(*some, tile.is_causal, plan.scale))
        if sinks is not None:
            merged.add_sinks(sinks)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, merged.lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        gradient = dense_heads(gradient)
        kernel = kernel_for(query, value, plan.softcap, plan.groups)
        of_query = query.new_zeros(query.shape, dtype=sum_dtype(query))
        collected = gradients_of(key, value, plan)
        for source, keys, values in blocks_of(key, value, plan, f"{plan.label} backward"):
            of_keys, of_values = collected.begin(source)
            for tile in plan.tiles(source):
                saved = (*_of_tile(tile, query, keys, values), _queries(out, tile), _queries(lse, tile))
                shares = kernel.backward(_queries(gradient, tile), saved, tile.is_causal, plan.scale)
                rows, queries, span = _indices(tile)
                of_query[rows, :, queries] += _restored(shares[0], tile)
                of_keys[rows, :, span] += _restored(shares[1], tile)
                of_values[rows, :, span] += _restored(shares[2], tile)
            collected.end(source)
        of_key, of_value = collected.own()
        of_sinks = _gradient_of_sinks(sinks, gradient, out, lse) if ctx.needs_input_grad[3] else None
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None


def _gradient_of_sinks(sinks: Tensor, gradient: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Of the softmax: -p (g · o), with the sink's probability p. Its value is zero."""
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    products = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return (probability * products).sum((0, 2)).neg_().to(sinks.dtype)


def _indices(tile: Tile) -> tuple[slice, slice, slice]:
    rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
    return rows, slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)


def _queries(tensor: Tensor, tile: Tile) -> Tensor:
    rows, queries, _ = _indices(tile)
    return _arranged(tensor[rows, :, queries], tile)


def _of_tile(tile: Tile, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, span = _indices(tile)
    return _queries(query, tile), _arranged(keys[rows, :, span], tile), _arranged(values[rows, :, span], tile)


def _arranged(tensor: Tensor, tile: Tile) -> Tensor:
    """A tile's part of [B, H, L, ..] as a kernel takes it: blocks as rows of the batch, reversed ones from the end."""
    if tile.num_blocks > 1:
        tensor = tensor.unflatten(2, (tile.num_blocks, -1)).transpose(1, 2).flatten(0, 1)
    return tensor.flip(2) if tile.is_reversed else tensor


def _restored(tensor: Tensor, tile: Tile) -> Tensor:
    """The inverse of :func:`_arranged`."""
    if tile.is_reversed:
        tensor = tensor.flip(2)
    if tile.num_blocks > 1:
        tensor = tensor.unflatten(0, (-1, tile.num_blocks)).transpose(1, 2).flatten(2, 3)
    return tensor


class _MergedOutput:
    """The output over the tiles so far, and the log-sum-exp of their scores."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._shape = *query.shape[:3], value.shape[3]
        self.out = query.new_empty(
            0
        )  # [B, H, L, F], in the dtype of sums; of one tile, which has all queries, as it is
        self.lse = query.new_empty(0)  # [B, H, L]

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        if not self.out.numel():
            if out.shape == self._shape and tile.num_blocks == 1 and not tile.is_reversed:
                self.out, self.lse = out, lse
                return
            rows, heads, length, size = self._shape
            # As kernels order it in memory, so that the heads of a position are one view for the output projection.
            self.out = out.new_zeros((rows, length, heads, size), dtype=sum_dtype(out)).transpose(1, 2)
            self.lse = lse.new_full(self._shape[:3], float("-inf"))
        self.out = accumulated(self.out)
        rows, queries, _ = _indices(tile)
        total, before = self.out[rows, :, queries], self.lse[rows, :, queries]
        if total.dtype == torch.float32 and total.numel() and has_kernels(total, out):
            from shoal.kernels.merge import merge

            merge(total, before, out, lse, tile.num_blocks, tile.is_reversed)
        else:
            with one_kernel():
                _merge(total, before, _restored(out, tile), _restored(lse, tile))

    def add_sinks(self, sinks: Tensor) -> None:
        """A key with the value zero: it takes its part of the probability."""
        after = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out = self.out * (self.lse - after).exp_().unsqueeze(-1)
        self.lse = after


def _merge(total: Tensor, before: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add a tile's output, [B, H, L, F], and its log-sum-exp, [B, H, L], in place."""
    after = torch.logaddexp(before, lse)
    total.mul_((before - after).exp_().unsqueeze(-1)).addcmul_(accumulated(out), (lse - after).exp_().unsqueeze(-1))
    before.copy_(after)
