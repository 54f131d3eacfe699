"""Attention of this rank's queries to the keys and values of all ranks, which move around a ring.

Each rank packs its keys and values into one buffer. In step s, rank r computes with the buffer of rank r - s, and
meanwhile sends it to rank r + 1 and receives the next one:

    step      0        1        2              forward     P - 1 sends of keys and values
    rank 0    0 ->     2 ->     1              backward    P - 1 sends of keys and values, and P - 1 of their gradients
    rank 1    1 ->     0 ->     2
    rank 2    2 ->     1 ->     0

The gradients of a buffer begin at the rank that uses it in step 1 and are sent on until they reach its owner, who adds
its own share. Outputs of tiles are merged by their log-sum-exp, in fp32; gradients are summed in fp32.

Instead of moving around a ring, all keys and values can be gathered: one all-gather in forward, one all-gather and one
reduce-scatter in backward, and P times the memory for keys and values.

Source: Ring Attention (arXiv:2310.01889); FlashAttention-2's backward (arXiv:2307.08691); all-gather: Llama 3
(arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.comm.protocol import Communicator, Work
from shoal.parallel.sequence.chunks import Chunks, Tile, num_positions, tiles_of
from shoal.parallel.sequence.kernels import accumulated, kernel_for, repeated, sum_dtype, summed

KeyExchange = Literal["ring", "all_gather"]


@dataclass(frozen=True)
class RingPlan:
    """What the ranks hold, and how keys and values reach them.

    Args:
        comm: None: this rank holds the whole sequence.
        chunks: of each rank.
        documents: as :func:`tiles_of` takes them.
    """

    comm: Communicator | None
    chunks: tuple[Chunks, ...]
    is_causal: bool
    documents: tuple[tuple[int, ...], ...] | None
    scale: float
    exchange: KeyExchange
    label: str

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    def tiles(self, source: int) -> tuple[Tile, ...]:
        """The tiles of this rank's queries and the keys of rank ``source``."""
        return tiles_of(self.chunks[self.rank], self.chunks[source], self.is_causal, self.documents)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, plan: RingPlan) -> Tensor:
    """Attention of this rank's queries, [B, H, L, E], to the keys and values of all ranks. Shape: [B, H, L, F].

    Args:
        key, value: [B, K, L, E] and [B, K, L, F] of this rank; K divides H.

    Communicates: see the module. Per rank and pass P - 1 times the bytes of its keys and values; in backward also of
        their gradients in fp32.
    Memory: in forward three buffers of one rank's keys and values (two on two ranks), one tile's output, and the output
        in fp32; in backward also four of their gradients in fp32. Scores: see ``kernels``.
    """
    out: Tensor = _RingAttention.apply(query, key, value, plan)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan) -> Tensor:
        kernel = kernel_for(query, value)
        merged = _MergedOutput(query, value)
        for source, keys, values in _blocks(key, value, plan, plan.label):
            for tile in plan.tiles(source):
                some = _of_tile(tile, query, keys, values)
                merged.add(tile, *kernel.forward(*some, tile.is_causal, plan.scale))
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        kernel = kernel_for(query, value)
        of_query = query.new_zeros(query.shape, dtype=sum_dtype(query))
        collected = _collected(key, value, plan)
        for source, keys, values in _blocks(key, value, plan, f"{plan.label} backward"):
            of_keys, of_values = collected.begin(source)
            for tile in plan.tiles(source):
                rows, queries, span = _indices(tile)
                share = kernel.backward(
                    gradient[rows, :, queries],
                    *_of_tile(tile, query, keys, values),
                    out[rows, :, queries],
                    lse[rows, :, queries],
                    tile.is_causal,
                    plan.scale,
                )
                of_query[rows, :, queries] += share[0]
                of_keys[rows, :, span] += summed(share[1], keys.shape[1])
                of_values[rows, :, span] += summed(share[2], values.shape[1])
            collected.end(source)
        of_key, of_value = collected.own()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _indices(tile: Tile) -> tuple[slice, slice, slice]:
    rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
    return rows, slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)


def _of_tile(tile: Tile, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, span = _indices(tile)
    heads = query.shape[1]
    return query[rows, :, queries], repeated(keys[rows, :, span], heads), repeated(values[rows, :, span], heads)


class _MergedOutput:
    """The output over the tiles so far, and the log-sum-exp of their scores."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._shape = *query.shape[:3], value.shape[3]
        self.out = query.new_empty(0)  # [B, H, L, F], in the dtype of sums
        self.lse = query.new_empty(0)  # [B, H, L]

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        if not self.out.numel():
            if out.shape == self._shape:
                self.out, self.lse = accumulated(out), lse
                return
            self.out = out.new_zeros(self._shape, dtype=sum_dtype(out))
            self.lse = lse.new_full(self._shape[:3], float("-inf"))
        rows, queries, _ = _indices(tile)
        total, before = self.out[rows, :, queries], self.lse[rows, :, queries]
        after = torch.logaddexp(before, lse)
        total.mul_((before - after).exp_().unsqueeze(-1)).addcmul_(accumulated(out), (lse - after).exp_().unsqueeze(-1))
        before.copy_(after)


class _Packed:
    """Keys and values of any rank in one buffer, one after the other."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan) -> None:
        self._shapes = key.shape, value.shape
        self._lengths = [num_positions(chunks) for chunks in plan.chunks]

    def numel(self, source: int) -> int:
        return sum(shape.numel() // max(shape[2], 1) * self._lengths[source] for shape in self._shapes)

    @property
    def most(self) -> int:
        return max(self.numel(source) for source in range(len(self._lengths)))

    def views(self, buffer: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """[B, K, S, E] and [B, K, S, F] of rank ``source``."""
        shapes = [(*shape[:2], self._lengths[source], shape[3]) for shape in self._shapes]
        numel = torch.Size(shapes[0]).numel()
        return buffer[:numel].view(shapes[0]), buffer[numel : self.numel(source)].view(shapes[1])

    def fill(self, buffer: Tensor, source: int, key: Tensor, value: Tensor) -> None:
        for view, tensor in zip(self.views(buffer, source), (key, value), strict=True):
            view.copy_(tensor)


class _Transfer(NamedTuple):
    """A buffer under way to the next rank, and one from the rank before."""

    sent: Work
    received: Work

    def wait(self) -> Tensor:
        """Wait for both; returns what was received."""
        received = self.received.wait()
        self.sent.drain()
        return received


def _pass_on(comm: Communicator, outgoing: Tensor, incoming: Tensor, label: str) -> _Transfer:
    # Neighbours issue the two in opposite orders: NCCL does a pair's sends and receives one after the other.
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank % 2:
        received = comm.recv(incoming, previous, label=label)
        return _Transfer(comm.send(outgoing, following, label=label), received)
    sent = comm.send(outgoing, following, label=label)
    return _Transfer(sent, comm.recv(incoming, previous, label=label))


def _blocks(key: Tensor, value: Tensor, plan: RingPlan, label: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank with its keys and values, this one first. What is received next moves while the caller computes."""
    comm = plan.comm
    if comm is None or comm.size == 1:
        yield 0, key, value
        return
    packed = _Packed(key, value, plan)
    if plan.exchange == "all_gather":
        own = comm.empty(packed.most, key.dtype, key.device)
        packed.fill(own, comm.rank, key, value)
        full = torch.empty(comm.size * packed.most, dtype=key.dtype, device=key.device)
        work = comm.all_gather(full, own, label=label)
        yield comm.rank, key, value
        work.drain()
        for step in range(1, comm.size):
            source = (comm.rank - step) % comm.size
            yield source, *packed.views(full[source * packed.most :], source)
        return
    # A buffer is received into two steps after it was sent: ranks need not be in the same step.
    buffers = [comm.empty(packed.most, key.dtype, key.device) for _ in range(min(comm.size, 3))]
    packed.fill(buffers[0], comm.rank, key, value)
    views = key, value
    sent: list[Work] = []
    for step in range(comm.size - 1):
        source, following = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        if step >= 2:
            sent[step - 2].drain()
        current, spare = buffers[step % 3], buffers[(step + 1) % 3 % len(buffers)]
        transfer = _pass_on(comm, current[: packed.numel(source)], spare[: packed.numel(following)], label)
        sent.append(transfer.sent)
        yield source, *views
        transfer.received.wait()
        views = packed.views(spare, following)
    yield (comm.rank + 1) % comm.size, *views
    for work in sent[-2:]:
        work.drain()


def _collected(key: Tensor, value: Tensor, plan: RingPlan) -> _LocalGradients:
    if plan.comm is None or plan.comm.size == 1:
        return _LocalGradients(key, value, plan)
    if plan.exchange == "all_gather":
        return _ScatteredGradients(key, value, plan, plan.comm)
    return _RingGradients(key, value, plan, plan.comm)


class _LocalGradients:
    """The gradients of the keys and values of the only rank, in the dtype of sums."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan) -> None:
        self._packed = _Packed(key, value, plan)
        self._dtype = sum_dtype(key)
        self._device = key.device
        self._label = f"{plan.label} gradients"
        self._own = torch.empty(0)

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        """Zeros, to which the caller adds its share of the gradients of the keys and values of rank ``source``."""
        self._own = torch.zeros(self._packed.numel(source), dtype=self._dtype, device=self._device)
        return self._packed.views(self._own, source)

    def end(self, source: int) -> None:
        """The share is complete."""

    def own(self) -> tuple[Tensor, Tensor]:
        """The sums of all ranks' shares, of this rank's keys and values."""
        return self._packed.views(self._own, 0)


class _RingGradients(_LocalGradients):
    """Gradients that are sent on from rank to rank until they reach the owner of the keys and values."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> None:
        super().__init__(key, value, plan)
        self._comm = comm
        self._share = self._own
        self._transfer: _Transfer | None = None

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        self._share = self._comm.empty(self._packed.numel(source), self._dtype, self._device).zero_()
        return self._packed.views(self._share, source)

    def end(self, source: int) -> None:
        if source == self._comm.rank:
            self._own = self._share
            return
        if self._transfer is not None:
            self._share += self._transfer.wait()
        # The rank before has used the keys and values of the rank before ``source``.
        numel = self._packed.numel((source - 1) % self._comm.size)
        incoming = torch.empty(numel, dtype=self._dtype, device=self._device)
        self._transfer = _pass_on(self._comm, self._share, incoming, self._label)

    def own(self) -> tuple[Tensor, Tensor]:
        assert self._transfer is not None
        self._own += self._transfer.wait()
        return self._packed.views(self._own, self._comm.rank)


class _ScatteredGradients(_LocalGradients):
    """Gradients of all ranks' keys and values, summed by one reduce-scatter."""

    def __init__(self, key: Tensor, value: Tensor, plan: RingPlan, comm: Communicator) -> None:
        super().__init__(key, value, plan)
        self._comm = comm
        self._full = comm.empty(comm.size * self._packed.most, self._dtype, self._device).zero_()

    def begin(self, source: int) -> tuple[Tensor, Tensor]:
        return self._packed.views(self._full[source * self._packed.most :], source)

    def own(self) -> tuple[Tensor, Tensor]:
        out = torch.empty(self._packed.most, dtype=self._dtype, device=self._device)
        self._comm.reduce_scatter(self._full, out, label=self._label).drain()
        return self._packed.views(out, self._comm.rank)
