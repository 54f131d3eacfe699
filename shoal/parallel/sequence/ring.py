"""Attention of this rank's queries to the keys and values of all ranks, which move around a ring.

Each rank packs its keys and values into one buffer. In step s, rank r computes with the buffer of rank r - s, and
meanwhile sends it to rank r + 1 and receives the next one:

    step      0        1        2              forward     P - 1 sends of keys and values
    rank 0    0 ->     2 ->     1              backward    P - 1 sends of keys and values, and P - 1 of their gradients
    rank 1    1 ->     0 ->     2
    rank 2    2 ->     1 ->     0

The gradients of a buffer begin at the rank that uses it in step 1 and are sent on until they reach its owner, which
adds its own share. Outputs of tiles are merged by their log-sum-exp, in fp32; gradients are summed in fp32.

With a window or documents keys and values go directly to the ranks that need them. Instead of moving
at all they can be gathered: one all-gather in forward, one all-gather and one reduce-scatter in backward, and P times
the memory for keys and values.

Source: Ring Attention (arXiv:2310.01889); FlashAttention-2's backward (arXiv:2307.08691); all-gather: Llama 3
(arXiv:2407.21783), section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.autograd import once_differentiable
from shoal.parallel.sequence.chunks import Tile
from shoal.parallel.sequence.exchange import RingPlan, blocks_of, gradients_of
from shoal.parallel.sequence.kernels import accumulated, dense_heads, kernel_for, sum_dtype


def ring_attention(query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, sinks: Tensor | None = None) -> Tensor:
    """Attention of this rank's queries, [B, H, L, E], to the keys and values of all ranks. Shape: [B, H, L, F].

    Args:
        key, value: [B, K, L, E] and [B, K, L, F] of this rank; K divides H.
        sinks: [H]: the score of one more key, whose value is zero; None: there is none.

    Communicates: see the module. Per rank and pass P - 1 times the bytes of its keys and values, or less; in backward
        also of their gradients in fp32.
    Memory: in forward three buffers of one rank's keys and values (two on two ranks), one tile's output, and the output
        in fp32; in backward also four of their gradients in fp32. Scores: see ``kernels``.
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
        self.out = query.new_empty(0)  # [B, H, L, F], in the dtype of sums
        self.lse = query.new_empty(0)  # [B, H, L]

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        if not self.out.numel():
            if out.shape == self._shape and tile.num_blocks == 1 and not tile.is_reversed:
                self.out, self.lse = accumulated(out), lse
                return
            rows, heads, length, size = self._shape
            # As kernels order it in memory, so that the heads of a position are one view for the output projection.
            self.out = out.new_zeros((rows, length, heads, size), dtype=sum_dtype(out)).transpose(1, 2)
            self.lse = lse.new_full(self._shape[:3], float("-inf"))
        out, lse = _restored(out, tile), _restored(lse, tile)
        rows, queries, _ = _indices(tile)
        total, before = self.out[rows, :, queries], self.lse[rows, :, queries]
        after = torch.logaddexp(before, lse)
        total.mul_((before - after).exp_().unsqueeze(-1)).addcmul_(accumulated(out), (lse - after).exp_().unsqueeze(-1))
        before.copy_(after)

    def add_sinks(self, sinks: Tensor) -> None:
        """A key with the value zero: it takes its part of the probability."""
        after = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
        self.out = self.out * (self.lse - after).exp_().unsqueeze(-1)
        self.lse = after
